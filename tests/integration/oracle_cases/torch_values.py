"""Put and get: torch."""

from __future__ import annotations

import numpy as np
import ray
import torch
from oracle_outcome import tensor_bytes

from oracle_cases.helpers import round_trip, strides
from oracle_cases.payloads import LabelledTensor, ScaledTensor, floats, random_bytes, small_network
from oracle_cases.registry import case
from oracle_cases.remotes import keeper, same, scale

DTYPES = "bool uint8 int8 int16 int32 int64 float16 bfloat16 float32 float64 complex64 complex128"
DTYPES_TORCH_MAY_NOT_PICKLE = "uint16 uint32 uint64 complex32 float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu"


@case
def tensor_dtypes():
    raw = random_bytes()
    return {name: round_trip(raw.clone().view(getattr(torch, name))) for name in DTYPES.split() if name != "bool"}


@case
def tensor_bool():
    return round_trip(random_bytes() > 100)


@case
def tensor_dtypes_torch_may_not_pickle():
    """Some releases of torch cannot unpickle these; carrying them intact is as good as the same refusal."""
    return {name: _intact_or_refused(getattr(torch, name)) for name in DTYPES_TORCH_MAY_NOT_PICKLE.split()}


def _intact_or_refused(dtype):
    source = random_bytes().view(dtype)
    try:
        got = round_trip(source)
    except ray.exceptions.RaySystemError:
        return "intact or refused"
    intact = got.dtype == source.dtype and got.shape == source.shape and tensor_bytes(got) == tensor_bytes(source)
    return "intact or refused" if intact else got


@case
def tensor_special_floats():
    tensor = floats()
    tensor[0, :5] = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0, 1e-42])
    return round_trip(tensor)


@case
def tensor_views():
    base = floats(shape=(512, 512))
    views = [base.t(), base[::2, 1::3], base[10:400], base[3].expand(256, 512), base[:, 5:300], base.permute(1, 0)]
    return [round_trip(view) for view in views]


@case
def tensor_strides():
    """Memory layout of dense tensors. (A slice is packed to its own size, where plain Ray ships all that it is a slice of.)"""
    base = floats(shape=(64, 64, 64))
    views = [base, base.transpose(0, 2), base[:32]]
    views.append(base.unsqueeze(0).to(memory_format=torch.channels_last))
    return [[strides(got), got.is_contiguous()] for got in map(round_trip, views)]


@case
def tensor_conjugate_and_negative_views():
    tensor = torch.complex(floats(), floats(3))
    got = round_trip([tensor.conj(), tensor.conj().imag, tensor.imag])
    return [got, [x.is_conj() for x in got], [x.is_neg() for x in got], got[0] * 2]


@case
def tensor_empty_and_scalar():
    empty = [torch.empty(0), torch.empty(0, 5, dtype=torch.int64)]
    return round_trip([*empty, torch.tensor(2.5), floats(), torch.tensor(True)])


@case
def tensor_requires_grad():
    leaf = floats().requires_grad_()
    return [round_trip(leaf), round_trip({"leaf": leaf, "plain": floats(1)})]


@case
def tensor_result_of_autograd():
    leaf = floats().requires_grad_()
    leaf.square().sum().backward()
    return [round_trip(leaf * 2), round_trip(leaf), round_trip(leaf.grad)]


@case
def nn_parameter():
    got = round_trip([torch.nn.Parameter(floats()), torch.nn.Parameter(floats(1), requires_grad=False)])
    return [got, [isinstance(x, torch.nn.Parameter) for x in got]]


@case
def parameter_with_attribute():
    parameter = torch.nn.Parameter(floats())
    parameter.shard = {"rank": 1, "of": floats(2)}
    return round_trip(parameter)


@case
def tensor_subclass_with_attribute():
    got = round_trip([LabelledTensor.labelled(floats(), {"origin": floats(1)}), floats(2)])
    return [got, type(got[0] + 1).__qualname__]


@case
def tensor_wrapper_subclass():
    got = round_trip(ScaledTensor(random_bytes(), floats(1)))
    return [type(got).__qualname__, got.shape, got.dtype, got.values_, got.scale_]


@case
def tensor_with_python_attribute():
    tensor = floats()
    tensor.note = "kept?"
    tensor.mask = floats(9)
    return round_trip(tensor)


@case
def state_dict_of_module():
    state = small_network().state_dict()
    got = round_trip(state)
    return [got, got._metadata, small_network().load_state_dict(got)]


@case
def nn_module():
    module = small_network().eval()
    got = round_trip(module)
    return [got, got(torch.ones(2, 256)).shape, [p.requires_grad for p in got.parameters()]]


@case
def optimizer_state():
    module = torch.nn.Linear(256, 384)
    with torch.no_grad():
        module.weight.copy_(floats(shape=(384, 256)))
    optimizer = torch.optim.Adam([module.weight], lr=0.5)
    module.weight.square().sum().backward()
    optimizer.step()
    return round_trip(optimizer.state_dict())


@case
def sparse_tensors():
    dense = floats() * (floats() % 3 == 0)
    return round_trip([dense.to_sparse(), dense.to_sparse_csr(), dense.to_sparse().coalesce()])


@case
def jagged_nested_tensor():
    parts = [floats(i, (100 * i, 256)) for i in (1, 2, 3)]
    return round_trip({"jagged": torch.nested.nested_tensor(parts, layout=torch.jagged), "plain": parts[0]})


@case
def quantized_tensor():
    return round_trip(torch.quantize_per_tensor(floats() / 1000, 0.1, 10, torch.qint8))


@case
def meta_tensor():
    return round_trip([torch.empty(1000, 1000, device="meta"), floats()])


@case
def packed_sequence():
    sequence = torch.nn.utils.rnn.pack_sequence([floats(i, (200 - i, 512)) for i in range(2)])
    return round_trip(sequence)


@case(needs="tensordict")
def tensordict_plain_and_nested():
    from tensordict import TensorDict

    inner = TensorDict({"x": floats(shape=(64, 1024))}, batch_size=[64])
    outer = TensorDict({"a": floats(1, (64, 2048)), "inner": inner, "mask": torch.ones(64, dtype=torch.bool)}, [64])
    got = round_trip(outer)
    got["a"][0] = 5
    return [got, round_trip(outer.lock_()), got[:3].batch_size, torch.cat([got, got]).batch_size]


@case(needs="tensordict")
def tensordict_with_non_tensors():
    from tensordict import NonTensorData, TensorDict
    from tensordict.tensorclass import NonTensorStack

    texts = NonTensorStack(*[NonTensorData(f"text {i}") for i in range(4)])
    source = TensorDict({"a": floats(shape=(4, 40_000)), "texts": texts, "meta": NonTensorData({"k": 1}, [4])}, [4])
    got = round_trip(source)
    return [got["a"], list(got["texts"]), got["meta"], sorted(map(str, got.keys())), got.batch_size]


@case(needs="tensordict")
def tensordict_to_and_from_workers():
    from tensordict import TensorDict

    source = TensorDict({"a": floats(shape=(64, 2048)), "b": {"c": floats(1, (64, 512))}}, [64])
    ray.get(keeper().keep.remote(source))
    kept, returned = keeper().read.remote(), same.remote(ray.put(source))
    return [ray.get(kept), ray.get(returned), ray.get(scale.remote(source, 2))]


@case(needs="verl")
def verl_dataproto():
    from verl import DataProto

    tensors = {"ids": floats(shape=(8, 16_384)).long(), "mask": torch.ones(8, 16, dtype=torch.bool)}
    source = DataProto.from_dict(tensors, {"uid": np.array(list("abcdefgh"), dtype=object)}, {"step": 3, "t": floats()})
    got, seen = round_trip(source), ray.get(same.remote(source))
    parts = [(dict(part.batch.items()), part.non_tensor_batch, part.meta_info) for part in got.chunk(2)]
    return [type(got).__qualname__, len(got), got.batch, got.non_tensor_batch, got.meta_info, parts, seen.batch]
