"""FedAvg that writes down how long each round took: from its messages being made to its mean."""

import json
import os
import time

import numpy as np
from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

PART_VALUES = 1 << 20  # 4 MiB
app = ServerApp()


class Timed(FedAvg):
    def configure_train(self, *arguments):
        self.began_s = time.perf_counter()
        return super().configure_train(*arguments)

    def aggregate_train(self, server_round, replies):
        result = super().aggregate_train(server_round, replies)
        self.seconds.append(time.perf_counter() - self.began_s)
        with open(f"{self.out}.new", "w") as file:
            json.dump(self.seconds, file)
        os.replace(f"{self.out}.new", self.out)
        return result


@app.main()
def main(grid: Grid, context: Context) -> None:
    config = context.run_config
    num_values = int(config["megabytes"] * 1e6) // 4
    sizes = [PART_VALUES] * (num_values // PART_VALUES) + [num_values % PART_VALUES]
    arrays = ArrayRecord([np.zeros(size, dtype=np.float32) for size in sizes if size])
    sites = config["sites"]
    strategy = Timed(fraction_train=1.0, fraction_evaluate=0.0, min_train_nodes=sites, min_available_nodes=sites)
    strategy.seconds, strategy.out = [], config["out"]
    strategy.start(grid=grid, initial_arrays=arrays, num_rounds=config["rounds"], timeout=3600.0)
