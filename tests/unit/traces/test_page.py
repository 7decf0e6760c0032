"""The page of runs of all kinds, without a browser: its size, and its pictures against the sums."""

from __future__ import annotations

import base64
import json
import re
import zlib
from pathlib import Path

import attrs
import pytest
from real_traces import each

from gpu_job import GpuJob
from profdeck_traces.analysis.detail_model import Timeline, TimelineLane
from profdeck_traces.analysis.model import RankSummary
from profdeck_traces.analysis.pictures import reduced
from profdeck_traces.loading import summarise
from profdeck_traces.report.page import write_page


def of_lane(lane: TimelineLane, picture: Timeline) -> dict[str, float]:
    """Return the time of each class of a lane, in microseconds."""
    shares = zlib.decompress(base64.b64decode(lane.shares))
    bucket_us = picture.duration_us / picture.buckets
    assert len(shares) == len(lane.classes) * picture.buckets
    return {
        name: sum(shares[row * picture.buckets : (row + 1) * picture.buckets]) / 255 * bucket_us
        for row, name in enumerate(lane.classes)
    }


def check_picture(rank: RankSummary) -> None:
    """Check that the sums of the picture equal the tables, except for rounding to 1/255."""
    picture = rank.timelines[0]
    rounding_us = picture.duration_us / 255
    lanes = {(lane.kind, lane.group, lane.name): of_lane(lane, picture) for lane in picture.lanes}
    if rank.account is not None and rank.account.steps == len(rank.steps):  # the account excludes cold steps
        (drawn,) = (times for (kind, _, _), times in lanes.items() if kind == "path")
        assert sum(drawn.values()) == pytest.approx(rank.account.time_us, abs=2 * rounding_us)
        for owner in rank.account.owners:
            assert drawn[owner.kind] >= owner.time_us - 2 * rounding_us
    for device in rank.devices:
        (drawn,) = (
            times for (kind, group, _), times in lanes.items() if (kind, group) == ("device", str(device.device))
        )
        idle = {f"idle: {cause.cause}": cause.idle_us for cause in device.idle}
        for cause, time_us in idle.items():
            assert drawn.get(cause, 0.0) == pytest.approx(time_us, abs=2 * rounding_us), (device.device, cause)
        work = sum(time_us for name, time_us in drawn.items() if not name.startswith("idle"))
        assert work == pytest.approx(device.busy_us, abs=2 * rounding_us), device.device
        for stream in device.streams:
            key = ("stream", str(device.device), f"stream {stream.stream}")
            if key in lanes:  # the stages with the longest times
                assert sum(lanes[key].values()) >= stream.busy_us - 2 * rounding_us


def check_page(path: Path) -> str:
    run, errors = summarise([path], buckets=1024)
    assert errors == []
    for rank in run.ranks:
        if rank.timelines:
            picture = reduced(rank.timelines[0], 256)
            check_picture(attrs.evolve(rank, timelines=(picture,)))
            assert all(event.duration_us >= picture.duration_us / 128 for event in picture.events)
    page = write_page([run], [path.name])
    assert len(page.encode()) <= 150_000 + 30_000 * len(run.ranks)
    text = re.sub(r"<script.*?</script>|<style.*?</style>", "", page, flags=re.DOTALL)
    assert not re.search(r"\b(?:nan|None|inf)\b", text)
    for rank in run.ranks:
        if rank.timelines:
            check_picture(rank)
    return text


@pytest.mark.parametrize(
    "job",
    [
        GpuJob(ranks=2, slow_rank=1),
        GpuJob(products=100, launch_us=30, product_us=10, small=200),
        GpuJob(steps=1, items=3, pageable_us=500),
    ],
    ids=["straggler", "small", "one step"],
)
def test_pictures_agree_with_the_tables(tmp_path: Path, job: GpuJob) -> None:
    text = check_page(job.write(tmp_path / "run"))
    assert "Device time per" in text
    assert text.index("<h3>Critical path</h3>") < text.index("Device time per")
    assert re.search(r"critical path: (host|device) ", text)
    assert "overlapped" in text
    assert ("By collective" in text) is (job.ranks > 1)
    assert 'id="timeline"' in text


@pytest.mark.shared_data
@each("gpu/*.json.gz", "npu/*.json", "npu/*.csv")
def test_pages_of_real_traces(path: Path) -> None:
    check_page(path)


def test_host_only_trace_has_stages_and_threads(tmp_path: Path) -> None:
    events = [
        {"ph": "X", "cat": category, "name": name, "ts": step * 100 + begin, "dur": length, "pid": 1, "tid": 1}
        for step in range(4)
        for category, name, begin, length in (
            ("user_annotation", f"ProfilerStep#{step}", 0, 99),
            ("user_annotation", "rollout", 10, 60),
            ("cpu_op", "aten::mm", 20, 30),
        )
    ]
    (tmp_path / "a.json").write_text(json.dumps({"traceEvents": events}))
    text = check_page(tmp_path / "a.json")
    assert "rollout" in text
    assert "Device time" not in text


def test_largest_owner_has_its_gain_and_the_next_limit(tmp_path: Path) -> None:
    text = check_page(GpuJob(steps=3, products=40, launch_us=5).write(tmp_path / "run"))
    _, _, owners = text.partition("<h3>Critical path</h3>")
    row = owners.partition("<tr><td")[2].partition("</tr>")[0]
    assert re.search(r'<rect class="bar" width="120.0"', row)
    assert row.count('<td class="n">') == 2
    assert '<td class="n"></td>' not in row
    assert "Without the first row, the next limit is the " in text


@pytest.mark.parametrize(
    ("durations", "typical"),
    [
        ([[100, 100, 100, 100, 100], [100, 100, 300, 100, 100]], 11),
        ([[100, 50, 100, 100, 100], [100, 100, 300, 100, 100]], 13),
        ([[100, 100, 101, 100, 100], [200, 200, 205, 200, 200]], 12),
    ],
)
def test_all_ranks_show_the_same_step(tmp_path: Path, durations: list[list[int]], typical: int) -> None:
    """If each rank selected a step separately, the page would draw different steps as one."""
    for rank, of_rank in enumerate(durations):
        starts = [sum(of_rank[:step]) for step in range(len(of_rank))]
        events = [
            {"ph": "X", "cat": category, "name": name, "ts": start, "dur": duration, "pid": 1, "tid": 1}
            for step, (start, duration) in enumerate(zip(starts, of_rank, strict=True), 10)
            for category, name in (("user_annotation", f"ProfilerStep#{step}"), ("cpu_op", "aten::mm"))
        ]
        document = {"distributedInfo": {"rank": rank, "world_size": 2}, "traceEvents": events}
        (tmp_path / f"rank{rank}.json").write_text(json.dumps(document))
    run, _ = summarise([tmp_path], buckets=64)
    assert [picture.title for rank in run.ranks for picture in rank.timelines] == [
        "recording",
        f"ProfilerStep#{typical}",
    ] * 2
