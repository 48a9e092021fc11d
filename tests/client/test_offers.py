"""What a worker is told: nothing that the site did not agree to, and no secret of the site."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from samples.trial_site import MANIFEST, SITE, TrialSite, make_offer

from atoll.client.offers import Admission, admit, preparation
from atoll.client.settings import ReproducibleSection, SiteSettings, load_settings
from atoll.cluster.messages import decode, encode
from atoll.cluster.registry import hash_script
from atoll.wire import control_pb2 as pb
from atoll.wire.errors import BadManifest, NotAllowed, Unknown
from atoll.wire.job import parse_job
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


def make_script_offer(site: TrialSite, text: str = "import atoll\n", **job: object) -> tuple[pb.RunOffer, SiteSettings]:
    """An offer of a run of the script `old`, whose file is `text` at the site."""
    path = site.root / "train.py"
    path.write_text(text)
    site.home.settings.write_text(site.home.settings.read_text().replace("/opt/train.py", str(path)))
    offer = make_offer()
    table = {"name": "trial", "script": "old", "rounds": 3, **job}
    offer.job = parse_job({"job": table}).canonical()
    offer.app_hash = hash_script(path)
    return offer, load_settings(site.home.settings)


def test_a_script_is_admitted_by_name_and_hash(plain: TrialSite) -> None:
    offer, settings = make_script_offer(plain)
    admission = admit(offer, settings=settings, home=plain.home)
    assert admission.script == plain.root / "train.py"
    assert (admission.app, admission.data) == (None, {})
    told = preparation(admission, settings=settings, home=plain.home, secret=SECRET)
    assert (told.app_name, told.app_hash, told.distribution) == ("old", offer.app_hash, "")


def test_a_script_s_data_is_that_of_the_site(plain: TrialSite) -> None:
    offer, settings = make_script_offer(plain, data="trial")
    assert admit(offer, settings=settings, home=plain.home).data == settings.data["trial"]
    offer, settings = make_script_offer(plain, data="none-such")
    with pytest.raises(Unknown, match=r"site north has no data 'none-such'"):
        admit(offer, settings=settings, home=plain.home)


def test_another_version_of_a_script_is_refused_with_both_hashes(plain: TrialSite) -> None:
    offer, settings = make_script_offer(plain)
    (plain.root / "train.py").write_text("import os\n")
    with pytest.raises(
        NotAllowed, match=f"script 'old' at site north has hash .*, the run wants {offer.app_hash}"
    ) as told:
        admit(offer, settings=settings, home=plain.home)
    assert (told.value.field, told.value.bound) == ("script_hash", offer.app_hash)


def test_a_script_that_is_gone_is_refused_without_its_path(plain: TrialSite) -> None:
    offer, settings = make_script_offer(plain)
    (plain.root / "train.py").unlink()
    with pytest.raises(Unknown, match=r"cannot read its script 'old': correct its path under \[scripts.old\]") as told:
        admit(offer, settings=settings, home=plain.home)
    assert str(plain.root) not in str(told.value)


@pytest.mark.parametrize(
    ("job", "told"),
    [
        ({"app": "old", "data": "trial"}, "knows no app 'old': it is a script here: the job says script = "),
        ({"script": "trial"}, "knows no script 'trial': it is an app here: the job says app = "),
        ({"script": "unheard"}, r"knows no script 'unheard': add \[scripts.unheard\] for it"),
    ],
)
def test_apps_and_scripts_are_not_taken_for_one_another(plain: TrialSite, job: dict[str, str], told: str) -> None:
    offer = make_offer()
    offer.job = parse_job({"job": {"name": "trial", "rounds": 3, **job}}).canonical()
    with pytest.raises(Unknown, match=told):
        admit(offer, settings=load_settings(plain.home.settings), home=plain.home)
