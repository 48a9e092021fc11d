"""Connected sites that a run has no use for: they are not asked to join it, and the reason is told to people."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from atoll.aggregation.schedule import Selective
from atoll.aggregation.strategy import require_regions_allowed
from atoll.server.driver import RunDriver
from atoll.server.offers import Offers
from atoll.server.regions import is_region
from atoll.server.sessions import Session
from atoll.transport.hello import SECAGG
from atoll.wire.errors import ConfigError


def refuse_unfit(drivers: Iterable[RunDriver], sessions: Iterable[Session], offers: Offers) -> None:
    """Sites that a run has no use for are not asked to join it, and people see why."""
    for driver in drivers:
        for site, reason in unfit(driver, sessions):
            if not offers.is_declined(driver.run, site):
                offers.declined(driver.run, site, reason)
                driver.summary.site_is(site, "declined", detail=reason)


def unfit(driver: RunDriver, sessions: Iterable[Session]) -> Iterator[tuple[str, str]]:
    """Sites that cannot take part, each with the reason: by their labels, or regions whose sums the reducer cannot use."""
    schedule = driver.plan.schedule
    for session in sessions:
        site = session.site
        if session.ended or (driver.only and site not in driver.only) or site in driver.state.members:
            continue
        labels = dict(session.hello.capacity.labels)
        if isinstance(schedule, Selective) and not schedule.takes(site, labels):
            has = ", ".join(f"{name} = {value}" for name, value in sorted(labels.items())) or "none"
            yield (
                site,
                f"the job's schedule asks for other sites or labels than this one's ({has}); see [capacity] of site.toml",
            )
        elif driver.plan.masked and not is_region(session) and SECAGG not in session.hello.features:
            yield site, "its software knows no secure aggregation, which the job asks for; update Atoll at the site"
        elif is_region(session):
            try:
                require_regions_allowed(driver.job, [site])
            except ConfigError as error:
                yield site, str(error)
