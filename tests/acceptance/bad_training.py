"""Bad training data: a table of forward_backward requests that are refused, each with the words of its refusal."""

import struct
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np

from tests.acceptance.bad_target import Case, Target, refused
from tests.bases import png
from tinsmith.wire import tinker_pb2 as pb

NAN, INF = float("nan"), float("inf")
PROTOBUF = "application/x-protobuf"


def text(*tokens: int) -> pb.Chunk:
    return pb.Chunk(encoded_text=pb.EncodedTextChunk(tokens=np.array(tokens, dtype="<i4").tobytes()))


def image(data: bytes, format: str = "png", **fields: Any) -> pb.Chunk:
    return pb.Chunk(image=pb.ImageChunk(data=data, format=format, **fields))


def tensor(values: Any) -> pb.Tensor:
    """Integers as int64, other numbers as float32; what is a tensor already as it is."""
    if isinstance(values, pb.Tensor):
        return values
    array = np.asarray(values)
    integers = array.dtype.kind == "i"
    dense = array.astype("<i8" if integers else "<f4").tobytes()
    return pb.Tensor(dense=dense, dtype=pb.DTYPE_INT64 if integers else pb.DTYPE_FLOAT32, shape=array.shape)


def csr(shape: list[int], crow: list[int], col: list[int], values: list[int]) -> pb.Tensor:
    parts = {"crow_indices": crow, "col_indices": col, "values": values}
    encoded = pb.SparseCsr(**{name: np.array(numbers, dtype="<i8").tobytes() for name, numbers in parts.items()})
    return pb.Tensor(sparse_csr=encoded, dtype=pb.DTYPE_INT64, shape=shape)


def example(*chunks: pb.Chunk, **inputs: Any) -> pb.Datum:
    """A datum; without chunks one of three tokens, without targets three of them."""
    tensors = {"target_tokens": [1, 2, 3]} | inputs
    encoded = {name: tensor(values) for name, values in tensors.items() if values is not None}
    return pb.Datum(model_input=chunks or [text(5, 6, 7)], loss_fn_inputs=encoded)


def training(*data: pb.Datum, loss_fn: str = "cross_entropy", **config: float | str) -> Callable[[Target], str]:
    """A forward_backward of these datums; what is wrong with it comes through its future."""
    values = {
        k: pb.LossConfigValue(text=v) if isinstance(v, str) else pb.LossConfigValue(number=v) for k, v in config.items()
    }
    message = pb.ForwardBackwardRequest(data=data, loss_fn=loss_fn, loss_fn_config_v2=values)

    def send(target: Target) -> str:
        message.model_id, message.seq_id = target.model.model_id, target.next()
        return target.failure(target.model.submit_protobuf(message.SerializeToString()))

    return send


def policy(loss_fn: str, **inputs: Any) -> Callable[[Target], str]:
    """A datum with what every policy loss needs, but for `inputs`."""
    return training(example(**{"logprobs": [-1.0] * 3, "advantages": [1.0] * 3} | inputs), loss_fn=loss_fn)


def png_that_claims(width: int, height: int) -> bytes:
    """A small PNG whose header says another size."""
    data = png(0)
    header = data[12:16] + struct.pack(">II", width, height) + data[24:29]
    return data[:12] + header + struct.pack(">I", zlib.crc32(header)) + data[33:]


UNKNOWN_FIELD = pb.Datum.FromString(example().SerializeToString() + b"\x9a\x06\x01x")

DATA = [
    Case("no data", training(), "data is empty ... at least one datum"),
    Case(
        "endless loss name",
        training(example(), loss_fn="x" * 5_000_000),
        "loss_fn 'xxx ... characters left out ... cross_entropy",
    ),
    Case(
        "too many datums",
        training(*[pb.Datum()] * 5000),
        "datum 4096: the request holds more than 4096 datums (max_datums)",
    ),
    Case(
        "too many chunks",
        training(example(*[text(1)] * 33_000)),
        "datum 0: the request holds more than 32768 chunks (max_chunks)",
    ),
    Case(
        "too many images",
        training(example(*[image(b"")] * 4100)),
        "datum 0: the request holds more than 4096 images (max_images)",
    ),
    Case("no chunks", training(pb.Datum(loss_fn_inputs={"target_tokens": tensor([1])})), "datum 0 ... holds no token"),
    Case("no tokens", training(example(), example(text())), "datum 1 ... holds no token"),
    Case(
        "token below 0",
        training(example(text(5, -1, 7))),
        "datum 0: chunk 0: token at position 1 is -1 ... vocabulary of 2048",
    ),
    Case(
        "token too large",
        training(example(text(5), text(6, 2048))),
        "datum 0: chunk 1: token at position 1 is 2048 ... of 2048",
    ),
    Case(
        "target below 0",
        training(example(target_tokens=[1, 2, -1])),
        "datum 0: target_tokens at position 2 is -1 ... of 2048",
    ),
    Case(
        "target too large",
        training(example(target_tokens=[2**40, 2, 3])),
        "position 0 is 1099511627776 ... vocabulary of 2048",
    ),
    Case(
        "target of many too large",
        training(example(target_tokens=[[1, 2], [3, 4], [5, 2048]])),
        "position (2, 1) is 2048",
    ),
    Case(
        "longer than the context",
        training(example(text(*[1] * 32769))),
        "holds 32769 tokens ... window of text is 32768",
    ),
    Case("unknown field", training(UNKNOWN_FIELD), "protobuf fields that this version does not know"),
]

INPUTS = [
    Case("no targets", training(example(target_tokens=None, weights=[1.0] * 3)), "datum 0 ... no target_tokens"),
    Case(
        "targets are floats",
        training(example(target_tokens=[1.0, 2.0, 3.0])),
        "target_tokens is float32; send token ids as int64",
    ),
    Case(
        "too few targets",
        training(example(target_tokens=[1, 2])),
        "target_tokens has shape (2,) ... has 3 positions ... send (3,)",
    ),
    Case(
        "targets of three dimensions",
        training(example(target_tokens=[[[1]]] * 3)),
        "target_tokens has shape (3, 1, 1) ... (3, K)",
    ),
    Case(
        "no target a position",
        training(example(target_tokens=tensor(np.zeros((3, 0), int)))),
        "shape (3, 0) ... (3, K)",
    ),
    Case("one number as targets", training(example(target_tokens=tensor(np.int64(1)))), "3 positions"),
    Case("targets left out", training(example(target_tokens=[1, -100, 3])), "position 1 is -100 ... and weights of 0"),
    Case(
        "too few weights",
        training(example(weights=[1.0])),
        "weights has shape (1,) ... target_tokens has (3,) ... must be equal",
    ),
    Case(
        "weights in columns",
        training(example(weights=[[1.0]] * 3)),
        "weights has shape (3, 1) ... target_tokens has (3,)",
    ),
    Case(
        "NaN weight",
        training(example(), example(weights=[1.0, NAN, 1.0])),
        "datum 1: weights at position 1 is nan ... finite",
    ),
    Case(
        "infinite weight",
        training(example(weights=[INF, 1.0, 1.0])),
        "datum 0: weights at position 0 is inf ... finite",
    ),
    Case(
        "infinite advantage", policy("ppo", advantages=[1.0, 1.0, -INF]), "advantages at position 2 is -inf ... finite"
    ),
    Case("NaN logprob", policy("gspo", logprobs=[NAN, -1.0, -1.0]), "logprobs at position 0 is nan ... finite"),
    Case(
        "unknown input", training(example(masks=[1.0] * 3)), "unknown key 'masks' ... known are target_tokens, weights"
    ),
    Case(
        "no logprobs",
        policy("importance_sampling", logprobs=None),
        "no logprobs ... needs target_tokens, logprobs, advantages",
    ),
    Case(
        "no advantages",
        policy("dro", advantages=None),
        "no advantages ... dro needs target_tokens, logprobs, advantages",
    ),
    Case("no ratio mask", policy("gspo"), "no sequence_ratio_mask ... gspo needs"),
    Case(
        "empty ratio mask",
        policy("gspo", sequence_ratio_mask=[0.0] * 3),
        "sequence_ratio_mask is 0 everywhere ... not 0",
    ),
    Case(
        "many targets in a policy loss",
        policy("cispo", target_tokens=[[1, 2]] * 3),
        "shape (3, 2) ... cispo takes one target ... send (3,)",
    ),
    Case(
        "weights beside advantages",
        policy("ppo", weights=[1.0, 0.5, 1.0]),
        "weights at position 1 is 0.5 ... ppo has no weights",
    ),
    Case(
        "mask beside advantages",
        policy("ppo", mask=[1.0, 1.0, 0.0]),
        "mask at position 2 is 0 ... ppo has no mask ... multiply",
    ),
    Case(
        "mask beside weights",
        training(example(mask=[0.0, 1.0, 1.0])),
        "mask at position 0 is 0 ... cross_entropy has no mask",
    ),
    Case(
        "half a position",
        policy("dro", mask=[1.0, 0.5, 1.0]),
        "mask at position 1 is 0.5 ... dro only asks ... send 1 for sampled",
    ),
    Case(
        "weighted dro", policy("dro", weights=[1.0, 2.0, 1.0]), "weights at position 1 is 2 ... multiply the advantages"
    ),
    Case(
        "bounds without clipping",
        policy("dro", clip_low_threshold=[0.5] * 3),
        "clip_low_threshold ... dro does not clip",
    ),
    Case(
        "bound below 0",
        policy("cispo", clip_low_threshold=[0.5, -0.5, 0.5]),
        "bounds at position 1 ... low_threshold=-0.5",
    ),
    Case(
        "bounds crossed",
        policy("ppo", clip_high_threshold=[1.2, 1.2, 0.7]),
        "at position 2 ... clip_low_threshold=0.8, clip_high_threshold=0.7",
    ),
]

LOSSES = [
    Case(
        "CSR column",
        training(example(target_tokens=csr([3, 2], [0, 1, 1, 1], [2], [7]))),
        "at position 0 is 2 ... [0, 2)",
    ),
    Case(
        "unknown loss",
        training(example(), loss_fn="crossentropy"),
        "loss_fn 'crossentropy' is unknown ... cross_entropy, ",
    ),
    Case(
        "uploaded loss",
        training(example(), loss_fn="custom", loss_id="x"),
        "'custom' is not built ... forward_backward_custom",
    ),
    Case(
        "unknown setting",
        training(example(), loss_fn="ppo", clip_low=0.5),
        "'clip_low' ... ppo's: clip_low_threshold, clip_high",
    ),
    Case(
        "setting in words",
        training(example(), loss_fn="dro", beta="small"),
        "loss_fn_config['beta'] is 'small' ... number",
    ),
    Case(
        "setting below 0",
        training(example(), loss_fn="dro", beta=-1.0),
        "loss_fn_config['beta'] is -1.0 ... at least 0",
    ),
    Case(
        "crossed settings",
        training(example(), loss_fn="gspo", clip_high_threshold=0.5),
        "clip_low_threshold=0.8, clip_high_threshold=0.5",
    ),
]

IMAGES = [
    Case(
        "image for a text model",
        training(example(image(png(0)))),
        "datum 0 ... chunk 0 is an image ... text takes text only",
    ),
    Case(
        "truncated image",
        training(example(text(1), image(png(0)[:300]), target_tokens=[1] * 7)),  # only a datum without fault is decoded
        "datum 0: chunk 1 ... png image of 96 x 64 pixels is broken",
        "vision",
    ),
    *(
        Case(name, training(example(text(1), chunk)), f"datum 0: chunk 1 ... {says}", "vision")
        for name, chunk, says in (
            ("broken image", image(b"not an image"), "12 bytes labelled 'png' ... not a PNG or JPEG image"),
            ("wrong label", image(png(0), "jpeg"), "labelled 'jpeg' but is 'png'"),
            (
                "too many pixels",
                image(png_that_claims(30000, 30000)),
                "30000 x 30000 pixels ... max_image_pixels ... scale it down",
            ),
            ("other count", image(png(0), expected_tokens=7), "expected_tokens is 7 ... takes 6 tokens in vision"),
        )
    ),
    Case(
        "targets without those of the image",
        training(example(text(1), image(png(0)), text(2))),
        "8 positions",
        "vision",
    ),
]

ADDRESSES = [
    Case(
        "not protobuf",
        refused("forward_backward", 400, b"\xff\xff\xff", PROTOBUF),
        "not a protobuf ForwardBackwardRequest",
    ),
    Case("no address", refused("forward_backward", 400, b"", PROTOBUF), "model_id='' ... seq_id=0 ... both are needed"),
    Case(
        "unknown model",
        refused(
            "forward_backward",
            404,
            pb.ForwardBackwardRequest(model_id="a:train:0", seq_id=1).SerializeToString(),
            PROTOBUF,
        ),
        "model 'a:train:0' does not exist",
    ),
]

TRAINING = [*DATA, *INPUTS, *LOSSES, *IMAGES, *ADDRESSES]
