"""What a worker is told: nothing that the site did not agree to, and no secret of the site."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from samples.trial_site import MANIFEST, SITE, TrialSite, make_offer

from atoll.client.offers import Admission, admit, preparation
from atoll.client.settings import ReproducibleSection, SiteSettings, load_settings
from atoll.cluster.messages import decode, encode
from atoll.wire.errors import BadManifest, NotAllowed, Unknown
from atoll.wire.manifest import Manifest
from atoll.wire.parallel_section import ParallelSection

SECRET = bytes(range(32))


@pytest.fixture
def plain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TrialSite:
    site = TrialSite(root=tmp_path)
    site.make("127.0.0.1:1")
    monkeypatch.syspath_prepend(site.installed)
    return site


def admitted(site: TrialSite) -> tuple[Admission, SiteSettings]:
    settings = load_settings(site.home.settings)
    return admit(make_offer(), settings=settings, home=site.home), settings


def test_the_worker_gets_what_was_admitted(plain: TrialSite) -> None:
    admission, settings = admitted(plain)
    told = preparation(admission, settings=settings, home=plain.home, secret=SECRET)
    assert (told.run, told.site, told.app_name, told.device) == (admission.run, SITE, "trial", None)
    assert told.data == settings.data["trial"]
    assert Manifest.decode(Path(told.manifest_path).read_bytes()) == MANIFEST
    assert Path(told.state_folder).is_dir()
    assert told.job == admission.job.canonical().decode()


def test_the_seed_of_rounding_differs_by_run_and_hides_the_secret(plain: TrialSite) -> None:
    admission, settings = admitted(plain)

    def seed(one: Admission, secret: bytes = SECRET) -> str:
        return preparation(one, settings=settings, home=plain.home, secret=secret).rounding_seed_hex

    first = seed(admission)
    assert first == seed(admission)
    assert len(bytes.fromhex(first)) == 32
    assert first != SECRET.hex()
    assert first != seed(replace(admission, run=make_offer().run))
    assert first != seed(admission, bytes(32))


def test_the_site_s_own_layout_goes_to_the_worker(plain: TrialSite) -> None:
    admission, settings = admitted(plain)
    assert preparation(admission, settings=settings, home=plain.home, secret=SECRET).parallel is None
    text = plain.home.settings.read_text()
    plain.home.settings.write_text(text + '\n[parallel]\npp = 2\npipeline = { split_points = ["layers.1"] }\n')
    told = preparation(admission, settings=load_settings(plain.home.settings), home=plain.home, secret=SECRET)
    assert told.parallel is not None
    assert ParallelSection.model_validate(told.parallel).pipeline.split_points == ("layers.1",)
    assert decode(encode(told)) == told


def test_a_reproducible_site_rounds_alike_in_every_run(plain: TrialSite) -> None:
    admission, settings = admitted(plain)

    def seed(one: Admission, number: int, secret: bytes = SECRET) -> str:
        fixed = settings.model_copy(update={"reproducible": ReproducibleSection(seed=number)})
        return preparation(one, settings=fixed, home=plain.home, secret=secret).rounding_seed_hex

    assert seed(admission, 7) == seed(replace(admission, run=make_offer().run), 7, bytes(32))
    assert seed(admission, 7) != seed(admission, 8)


def test_a_manifest_that_is_none_is_refused(plain: TrialSite) -> None:
    offer = make_offer()
    offer.manifest = b"\xff"
    with pytest.raises(BadManifest):
        admit(offer, settings=load_settings(plain.home.settings), home=plain.home)


def test_another_version_of_the_app_is_refused_with_both_hashes(plain: TrialSite) -> None:
    offer = make_offer()
    offer.app_hash = "0" * 64
    advice = "install the same version of 'atoll-trial-site-apps' at the site and at the researcher"
    with pytest.raises(NotAllowed, match=f"has hash .*, the run wants {'0' * 64}: {advice}$") as caught:
        admit(offer, settings=load_settings(plain.home.settings), home=plain.home)
    assert caught.value.bound == offer.app_hash


def test_an_app_that_the_site_does_not_know_is_refused(plain: TrialSite) -> None:
    with pytest.raises(Unknown, match=r"site north knows no app 'unheard': add \[apps\] for it$"):
        admit(make_offer(app="unheard"), settings=load_settings(plain.home.settings), home=plain.home)
