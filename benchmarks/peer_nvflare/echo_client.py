"""A site of the echo work: every value changes a little and goes back."""

import nvflare.client as flare

flare.init()
while flare.is_running():
    received = flare.receive()
    if received is None:
        break
    params = {name: value + 2.0**-10 for name, value in received.params.items()}
    flare.send(flare.FLModel(params=params, meta={"NUM_STEPS_CURRENT_ROUND": 1}))
