"""The page of a run: what is in it, and that a browser draws it without network and without errors."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from rich.console import Console

from megatron.fill.account import Account
from megatron.fill.errors import FillError
from megatron.fill.records.account import AccountWriter
from megatron.fill.records.agent import write_agent
from megatron.fill.records.rank import rank_file
from megatron.fill.records.segment import begin_segment, read_segments
from megatron.fill.report import compose
from megatron.fill.report import page as page_module
from megatron.fill.report.compare import compared, print_compared
from megatron.fill.report.page import write_page
from megatron.fill.report.series import Series
from megatron.fill.types import BrakeEvent
from tests.support.extras import needs
from tests.support.segments import write_rank
from tests.support.synthetic import LAST, MS, report_of, synthetic_run

needs("vl_convert", "page")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
EVIL = "</script><b>job"


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> Path:
    """The page of the synthetic run, with a job of a hostile name and a brake."""
    run = tmp_path_factory.mktemp("run")
    ranks, workers, jobs = synthetic_run()
    begin_segment(run, "train --flag '<i>'", 2)
    folder = read_segments(run)[-1].folder
    named = {job.name: job for job in jobs}
    for record in ranks:
        brakes = [BrakeEvent(5, 0.03, 8, 69, MS)]
        write_rank(rank_file(folder, record.info.rank), replace(record, brakes=brakes))
        its = [(named[one.job], one) for one in workers if one.rank == record.info.rank]
        its = [(replace(job, name=EVIL), replace(one, job=EVIL)) for job, one in its]
        write_agent(folder / f"agent{record.info.rank}.jsonl", its)
        account = Account()
        account.settle()
        account.enter("forward")
        AccountWriter(folder, record.info, account, lambda: True).close()
    compose(run, page=partial(write_page, run / "page.html", run))
    return run / "page.html"


def charts(page: Path) -> dict:
    text = page.read_text(encoding="utf-8")
    found = re.search(r'<script type="application/json" id="charts">(.*?)</script>', text, re.DOTALL)
    assert found is not None
    return json.loads(found[1])


def test_it_has_every_chart_and_no_address(page):
    assert set(charts(page)) == {"timeline", "account", "parts", "uses", "harvest", "times", "predictions"}
    text = page.read_text(encoding="utf-8")
    assert set(charts(page)) < set(re.findall(r'class="chart" id="(\w+)"', text))  # the script removes the others
    outside = re.sub(r"<script>.*?</script>", "", text, flags=re.DOTALL)
    assert not re.search(r"https?://|src=|@import", outside)
    assert "stops filling until iteration 69" in text


def test_the_account_has_a_bar_for_each_rank_and_one_for_all(page):
    rows = charts(page)["account"]["data"]["values"]
    for where in ("rank 0, stage 0", "rank 1, stage 1", "all ranks"):
        its = {row["what"]: row["share"] for row in rows if row["stage"] == where}
        assert its["forward"] > 0.5
        assert sum(its.values()) == pytest.approx(1, abs=1e-3)


def test_what_a_job_is_called_does_no_harm(page):
    text = page.read_text(encoding="utf-8")
    assert EVIL not in text
    assert "<i>" not in text
    assert "&lt;/script&gt;&lt;b&gt;job" in text


def test_the_parts_of_an_iteration_add_up(page):
    rows = charts(page)["parts"]["data"]["values"]
    for stage in ("stage 0", "stage 1"):
        whole = sum(row["ms"] for row in rows if row["stage"] == stage)
        filled = 4  # of the synthetic run's ten iterations, each 1 ms longer
        assert whole == pytest.approx(100 + filled / LAST, abs=0.11)


def test_the_series_harvest_what_the_report_says():
    ranks, workers, jobs = synthetic_run()
    series = Series(1, LAST)
    named = {job.name: job for job in jobs}
    for record in ranks:
        series.add(record, [(named[one.job], one) for one in workers if one.rank == record.info.rank])
    expected = report_of(ranks, workers, jobs).total
    assert series._harvested.sum() / 1e9 == pytest.approx(expected.harvested_s)
    assert series._fillable.sum() / 1e9 == pytest.approx(expected.fillable_s)
    assert [one.iteration for one in series.bins()] == list(range(1, LAST + 1))


def test_the_harvest_of_older_bubbles_is_spread_over_them():
    ranks, workers, jobs = synthetic_run()
    worker = replace(workers[0], uses=list(workers[0].uses)[-2:], older_uses=len(workers[0].uses) - 2)
    series, whole = Series(1, LAST), Series(1, LAST)
    whole.add(ranks[0], [(jobs[0], workers[0])])
    series.add(ranks[0], [(jobs[0], worker)])
    assert series._harvested.sum() == pytest.approx(whole._harvested.sum())
    assert (series._harvested > 0).tolist() == (whole._harvested > 0).tolist()


def test_a_comparison_gives_both_and_their_difference():
    ranks, workers, jobs = synthetic_run()
    first, second = report_of(ranks, workers, jobs), report_of(ranks, [], [])
    rows = {figure.name: figure for figure in compared(first, second)}
    assert rows["iterations"].values == ("10", "10")
    assert rows["iterations"].difference == "+0"
    assert rows["steps"].difference == f"-{first.total.steps}"
    assert rows["harvest ratio"].difference.endswith(" pp")


def test_a_comparison_names_folders_as_they_are(capsys):
    report = report_of(*synthetic_run())
    print_compared(("[red]a", "b"), report, report, Console(width=80))
    assert "[red]a" in capsys.readouterr().out


def test_work_of_millions_is_written_out():
    report = report_of(*synthetic_run())
    jobs = [report.jobs[0].model_copy(update={"work_done": 1_731_180_000.0, "rate": 147_317_576.4})]
    text = "".join(page_module._jobs(jobs))
    assert "1,731,180,000 images" in text
    assert "147,317,576<" in text


def test_a_missing_library_is_said_with_its_remedy(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "vl_convert", None)
    with pytest.raises(FillError, match=re.escape("pip install 'pipefill[page]'")):
        page_module.library()


FRAME = """<iframe id="f" src="page.html" style="width:WIDTHpx;height:3000px;border:0"></iframe><script>
const look = () => { const d = document.getElementById("f").contentDocument;
  if (d && d.body && d.body.dataset.drawn) {
    const wide = d.documentElement.scrollWidth > d.documentElement.clientWidth;
    document.title = "canvases " + d.querySelectorAll("canvas").length + " wide " + wide;
  } else setTimeout(look, 50); };
look();
</script>"""


@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
@pytest.mark.parametrize("width", [400, 1280])
@pytest.mark.parametrize("scheme", ["dark", "light"])
def test_a_browser_draws_it_without_a_complaint(page, width, scheme):
    frame = page.parent / f"frame{width}.html"
    frame.write_text(FRAME.replace("WIDTH", str(width)), encoding="utf-8")
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--allow-file-access-from-files", "--dump-dom"]
    flags += ["--enable-logging=stderr", "--virtual-time-budget=20000", f"--user-data-dir={page.parent}/chromium"]
    flags += [
        f"--blink-settings=preferredColorScheme={int(scheme == 'light')}",
        "--host-resolver-rules=MAP * ~NOTFOUND",
    ]
    done = subprocess.run([str(CHROMIUM), *flags, f"file://{frame}"], capture_output=True, text=True, check=False)
    assert "<title>canvases 7 wide false</title>" in done.stdout
    assert not [line for line in done.stderr.splitlines() if "CONSOLE" in line]
