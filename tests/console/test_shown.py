"""What pages make of data: curves without lost spikes, phases, batches, values as people read them."""

import json
import math
import threading
from random import Random

import numpy as np
import pytest

from tinsmith.config import Config, ServerConfig
from tinsmith.console.batches import describe_batch
from tinsmith.console.charts import bars, downsample, smoothed, stacked
from tinsmith.console.curves import Curves
from tinsmith.console.operations import describe_life, describe_settings
from tinsmith.console.overview import time_of_devices
from tinsmith.console.pages import Viewer, ago, duration, number, render, short, size, static_files, static_url
from tinsmith.console.phases import INTERVAL_S, KEPT, Phases
from tinsmith.console.samples import KeptSample, sample_page, samples_page
from tinsmith.observing.spans import DEVICE, OPERATIONS, PASSES, Span
from tinsmith.store.operations import MetricsRow, ShownOperation
from tinsmith.store.records import COMPARED
from tinsmith.wire import tinker_pb2
from tinsmith.wire.chunks import ImageChunk, TextChunk
from tinsmith.wire.forward_backward import Datum, ForwardBackwardRequest

NAN = math.nan


@pytest.mark.parametrize("seed", range(5))
def test_a_downsampled_curve_keeps_every_extreme_and_its_ends(seed: int) -> None:
    """Invariant: No spike of a curve is lost by drawing fewer points: the highest and lowest of each stretch stay."""
    random = Random(seed)
    values: list[float | None] = [random.gauss(0, 1) for _ in range(10_000)]
    spike, dip, hole = random.sample(range(1, 9_999), 3)
    values[spike], values[dip], values[hole] = 50.0, -50.0, NAN
    kept = downsample(range(10_000), values, 400)
    assert len(kept) <= 404
    assert {0, spike, dip, hole, 9_999} <= set(kept)
    assert kept == sorted(set(kept))
    for stretch in range(200):
        part = [at for at in range(50 * stretch, 50 * stretch + 50) if at != hole]
        highest, lowest = (max(part, key=lambda at: values[at] or 0), min(part, key=lambda at: values[at] or 0))
        assert {highest, lowest} <= set(kept)


def test_a_short_curve_is_drawn_whole() -> None:
    assert downsample(range(7), [1.0] * 7, 400) == list(range(7))


def test_smoothing_has_no_pull_of_the_start_and_passes_gaps_over() -> None:
    assert smoothed([3.0] * 5, 0.9) == pytest.approx([3.0] * 5)
    assert smoothed([1.0, 2.0], 0.5) == pytest.approx([1.0, (0.25 * 1 + 0.5 * 2) / 0.75])
    assert smoothed([1.0, NAN, None, 1.0], 0.9) == [1.0, None, None, pytest.approx(1.0)]
    assert smoothed([1.0, 5.0, 2.0], 0.0) == [1.0, 5.0, 2.0]


def test_bars_stand_upon_each_other() -> None:
    assert bars([0.5, 0.0, 1.0], [0.25, 0.0, 0.0], 4, 40) == "M0 10.0h4v20.0h-4zM8 0.0h4v40.0h-4z"
    paths = stacked({"b": [0.5], "a": [0.25], "z": [0.1]}, ["a", "b"], 4, 40)
    assert list(paths) == ["a", "b", "z"]
    assert paths == {"a": "M0 30.0h4v10.0h-4z", "b": "M0 10.0h4v20.0h-4z", "z": "M0 6.0h4v4.0h-4z"}


def row(number: int, kind: str, tokens: int = 0, **metrics: float | str) -> MetricsRow:
    told = {name.replace("_sum", ":sum").replace("_mean", ":mean"): value for name, value in metrics.items()}
    return MetricsRow(number, 100.0 + number, kind, tokens, json.dumps(told))


def test_curves_join_the_parts_of_a_step_and_can_be_read_in_pieces() -> None:
    rows = [
        row(1, "forward_backward", 10, loss_sum=4.0, weight_mean=1.0),
        row(2, "forward_backward", 30, loss_sum=8.0, weight_mean=2.0),
        row(3, "optim_step", grad_norm=0.5, learning_rate=0.1),
        row(4, "forward", 7, loss_sum=3.0),
        row(5, "forward_backward", 20, loss_sum="nan"),
        row(6, "optim_step", grad_norm="inf", learning_rate=0.1),
    ]
    whole, pieces = Curves(), Curves()
    whole.add(rows)
    for each in rows:
        pieces.add([each])
    assert pieces.drawn(0.5) == whole.drawn(0.5)
    drawn = whole.drawn(0.0)
    assert whole.steps == 2
    assert whole.read_to == 6
    assert drawn["loss:sum"] == {"x": [1, 2], "y": [12.0, None]}
    assert drawn["loss/token"] == {"x": [1, 2], "y": [0.3, None]}
    assert drawn["weight:mean"] == {"x": [1], "y": [pytest.approx(1.75)]}
    assert drawn["tokens"]["y"] == [40, 20]
    assert drawn["seconds"] == {"x": [2], "y": [3.0]}
    assert drawn["grad_norm"]["y"] == [0.5, None]
    assert drawn["forward/loss:sum"] == {"x": [2], "y": [3.0]}
    assert whole.names[:3] == ["loss/token", "loss:sum", "grad_norm"]


def test_what_is_compared_with_the_sampler_is_a_mean_over_tokens_however_a_step_is_split() -> None:
    def compared(number: int, kind: str, *sums: float | str) -> MetricsRow:
        return row(
            number, kind, 10, loss_sum=1.0, **{f"{name}_sum": each for name, each in zip(COMPARED, sums, strict=True)}
        )

    curves = Curves()
    curves.add([compared(1, "forward_backward", 3, 0.3, 0.06), compared(2, "forward_backward", 1, 0.5, 0.02)])
    curves.add([compared(3, "forward", 2, -1.0, 0.5), row(4, "optim_step", grad_norm=0.5)])
    curves.add([compared(5, "forward_backward", 0, 0.0, 0.0), row(6, "optim_step", grad_norm=0.5)])  # no token counts
    curves.add([compared(7, "forward_backward", 2, "inf", "inf"), row(8, "optim_step", grad_norm=0.5)])
    drawn = {name: curve for name, curve in curves.drawn(0.0).items() if "kl" in name}
    assert drawn == {
        "forward/kl_sampler_trainer/k1": {"x": [1], "y": [-0.5]},
        "forward/kl_sampler_trainer/k3": {"x": [1], "y": [0.25]},
        "kl_sampler_trainer/k1": {"x": [1, 3], "y": [pytest.approx(0.2), None]},
        "kl_sampler_trainer/k3": {"x": [1, 3], "y": [pytest.approx(0.02), None]},
    }


def test_curves_are_drawn_while_steps_are_added() -> None:
    """A page that is drawn in one thread meets whole steps of what another adds."""
    curves = Curves()
    told = [json.dumps({f"m{number % 7}": 1.0, "grad_norm": 0.5}) for number in range(1, 20_001)]
    rows = [MetricsRow(number, 100.0 + number, "optim_step", 0, each) for number, each in enumerate(told, 1)]
    adding = threading.Thread(target=curves.add, args=[rows])
    adding.start()
    while adding.is_alive():
        for drawn in curves.drawn(0.0, most=50).values():
            assert len(drawn["x"]) == len(drawn["y"])
        assert set(curves.last) <= {f"m{number}" for number in range(7)} | {"grad_norm", "seconds"}
    adding.join()
    assert curves.steps == 20_000


def test_no_page_of_one_sample_is_larger_than_another() -> None:
    """All answers together have so many tokens as one: the page is made in a fraction of a second."""
    body = {"sampling_session_id": "s:sample:0", "seq_id": 1, "num_samples": 64}
    body |= {"prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]}, "sampling_params": {"max_tokens": 8}}
    reply = tinker_pb2.SampleResponse()
    for _ in range(64):
        sequence = reply.sequences.add()
        sequence.tokens = np.arange(2_000, dtype="<i4").tobytes()
        sequence.logprobs = np.full(2_000, -1.0, "<f4").tobytes()
    kept = KeptSample("s:sample:0/1", "a", "b", None, 0.0, 0.0, json.dumps(body).encode(), reply.SerializeToString())
    answers = sample_page(kept, None)["answers"]
    assert len(answers) == 64
    assert {answer["left_out"] + len(answer["spans"]) for answer in answers} == {2_000}
    assert sum(len(answer["spans"]) for answer in answers) <= 6_000


def test_samples_are_searched_whole_and_listed_by_an_excerpt() -> None:
    tokens = list(range(5_000))
    body = {"sampling_session_id": "s:sample:0", "seq_id": 1, "num_samples": 1}
    body |= {"prompt": {"chunks": [{"type": "encoded_text", "tokens": tokens}]}, "sampling_params": {"max_tokens": 8}}
    kept = KeptSample("s:sample:0/1", "a", "b", None, 0.0, 0.0, json.dumps(body).encode(), b"")
    listed = samples_page([kept], {}, {}, 64)["samples"]
    assert listed[0]["prompt"].endswith("4998 4999")
    assert samples_page([kept], {}, {"q": "17 18 19"}, 64)["samples"] == listed
    assert samples_page([kept], {}, {"q": "5001"}, 64)["samples"] == []


def span(worker: int, name: str, began: float, seconds: float) -> Span:
    return name, DEVICE, began, seconds, {"worker": worker}


def test_phases_add_up_to_the_time_that_passed() -> None:
    phases, now = Phases(), 10_000 * INTERVAL_S
    phases.take([], {"training": 0.0, "sampling": 0.0}, now - 20)
    spans = [span(0, "backward", now - 12.5, 5.0), span(0, "waiting for requests", now - 7.5, 7.5)]
    phases.take([*spans, ("optim_step", OPERATIONS, now - 12, 3.0, {})], {"training": 50.0, "sampling": 0.0}, now - 1)
    told = phases.describe(now)
    assert told["begins_at"] == now - KEPT * INTERVAL_S
    (worker,) = told["workers"]
    activities = worker["activities"]
    assert activities["backward"][-3:] == [0.5, 0.5, 0.0]
    assert activities["waiting for requests"][-3:] == [0.0, 0.5, 1.0]
    assert sum(map(sum, activities.values())) * INTERVAL_S == pytest.approx(12.5)
    assert told["tokens_per_second"]["training"][-1] == 10.0
    idle, works = time_of_devices(told["workers"])
    assert (idle["activity"], idle["idles"], works["works"]) == ("waiting for requests", True, True)
    assert "clients have sent no work" in idle["reason"]


def test_phases_forget_what_is_older_than_ten_minutes_and_survive_a_clock_that_was_set() -> None:
    phases, now = Phases(), 10_000 * INTERVAL_S
    phases.take([span(0, "backward", now - 5, 5.0)], {"training": 1.0}, now)
    later = now + (KEPT + 1) * INTERVAL_S
    phases.take([span(0, "sampling", now - 5, 5.0)], {"training": 1.0}, later)
    assert phases.describe(later)["workers"] == []
    phases.take([span(1, "sampling", now - 5, 5.0)], {"training": 3.0}, now)
    phases.take([span(1, "sampling", later + 10_000, 5.0)], {"training": 3.0}, later + 10_005)
    told = phases.describe(later + 10_005)
    assert [worker["worker"] for worker in told["workers"]] == [1]


def test_a_batch_shows_the_weight_of_the_prediction_of_each_token() -> None:
    tokens, image = TextChunk(np.array([1, 2], np.int32)), ImageChunk(b"", None, "png", 3)
    inputs = {
        "target_tokens": np.array([2, 9, 9, 9, 5, 6]),
        "weights": np.array([0.0, 1.0, 1.0, 1.0, 0.5, -1.0], np.float32),
    }
    datum = Datum([tokens, image, TextChunk(np.array([5], np.int32))], inputs)
    request = ForwardBackwardRequest("m", 1, "cross_entropy", {}, False, [datum])
    told = describe_batch(1, request, lambda token: f"<{token}>")
    (shown,) = told["datums"]
    assert [each.get("text", each.get("image")) for each in shown["tokens"]] == ["<1><2>", 3, "<5>", "<6>"]
    assert [each["weight"] for each in shown["tokens"]] == [0.0, None, 0.5, -1.0]
    assert [each["shade"] for each in shown["tokens"]] == ["z", "", "p2", "m4"]
    assert (shown["length"], shown["weighted"], shown["cut"]) == (6, 5, False)


def test_a_batch_of_many_long_datums_is_cut() -> None:
    long = Datum([TextChunk(np.arange(5000, dtype=np.int32))], {"target_tokens": np.arange(5000)})
    told = describe_batch(1, ForwardBackwardRequest("m", 1, "cross_entropy", {}, False, [long] * 100), str)
    assert told["datum_count"] == 100
    assert sum(len(each["tokens"]) for each in told["datums"]) <= 8 * 600
    assert all(each["cut"] for each in told["datums"])


def test_a_life_begins_when_an_operation_came_and_ends_in_the_log() -> None:
    found = ShownOperation(1, "m", 2, "forward_backward", "dropped", 100.0, 104.0, None, None, 9, 1.0, "local")
    facts = {"request": "m/2", "queued_s": 1.0}
    spans: list[Span] = [
        ("forward_backward", OPERATIONS, 100.0, 3.0, facts),
        ("backward", PASSES, 101.5, 1.0, {"requests": ["m/2", "n/1"], "tokens": 9, "worker": 0}),
    ]
    told = describe_life(found, spans)
    bars = [(bar["name"], bar["begins_s"], bar["seconds"]) for bar in told["bars"]]
    assert bars == [("queued", 0.0, 1.0), ("computed", 1.0, 2.0), ("backward", 1.5, 1.0), ("recorded", 3.0, 1.0)]
    assert told["bars"][2]["told"] == "9 tokens on worker 0, shared with 1 other operation"
    assert told["length_s"] == 4.0
    assert told["status"] == "done"


def test_settings_show_what_differs_and_no_password() -> None:
    config = Config(server=ServerConfig(port=9, otlp_endpoint="http://me:secret@collector"))
    told = {each["name"]: each for each in describe_settings(config)}
    assert {name for name, each in told.items() if each["changed"]} == {"port", "otlp_endpoint"}
    assert told["otlp_endpoint"]["value"] == "http://…@collector"
    assert told["port"]["option"] == "--port"


def test_values_are_shown_as_people_read_them() -> None:
    assert [duration(each) for each in (None, 0.34, 2.06, 200, 18_120)] == [
        "–",
        "340 ms",
        "2.1 s",
        "3 min 20 s",
        "5 h 2 min",
    ]
    assert [size(each) for each in (None, 0, 1023, 1536, 200 * 2**20, 3 * 2**40)] == [
        "–",
        "0 B",
        "1023 B",
        "1.5 KiB",
        "200 MiB",
        "3.0 TiB",
    ]
    assert [number(each) for each in (None, 1234567, 0.000123456, 12345.67)] == [
        "–",
        "1,234,567",
        "0.0001235",
        "12,345.7",
    ]
    assert [ago(1000.0, now) for now in (1000, 1061, 1000 + 7200, 1000 + 3 * 86400, 0)] == [
        "just now",
        "1 min ago",
        "2 h ago",
        "3 d ago",
        "in 17 min",
    ]
    assert short("1b9d6bcd-bbfd-4b2d-9b5d-ab8dfbbd4bed:train:3") == "1b9d6bcd:3"


def test_pages_load_little_and_the_licence_of_each_file_is_there() -> None:
    files = static_files()
    others = (
        "LICENCES.md",
        "playground.css",
        "playground.js",
        "rollouts.css",
        "rollouts.js",
    )  # of pages without charts
    assert sum(len(file.content) for name, file in files.items() if name not in others) < 240_000
    licences = files["LICENCES.md"].content.decode()
    assert [name for name in files if ".min." in name and f"`{name}`" not in licences] == []
    assert static_url("console.css").endswith(files["console.css"].version)


def test_a_text_is_never_html() -> None:
    """Invariant: No text of a user or model is interpreted as HTML. Also: `tests/console/test_pages.py`."""
    told = render("error.html.jinja", {"status": 404, "told": "<script>1</script>"}, Viewer("/<b>", "", "", "", False))
    assert "<script>1" not in told
    assert "&lt;script&gt;1" in told
    assert " style=" not in told
