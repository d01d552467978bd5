import pytest
import torch

from springtide.core.errors import StorageError
from springtide.runtime.functions.pipeline.messages import Parcel, frame_tensor, pack_parcel, present, unpack_parcel
from springtide.storage.frames import FrameTensor, encode

TENSORS = (
    torch.randn(3, 4),
    torch.arange(5),
    torch.tensor(2.5, dtype=torch.bfloat16),
    torch.zeros(0, 7, dtype=torch.float64),
    torch.tensor([True, False]),
    torch.randn(4, 6).t(),
)


@pytest.mark.parametrize("is_tuple", [True, False])
def test_a_parcel_comes_out_as_it_went_in(is_tuple):
    tensors = TENSORS if is_tuple else TENSORS[:1]
    parcel = unpack_parcel(pack_parcel(Parcel(tensors, is_tuple, is_last=is_tuple)))
    assert (parcel.is_tuple, parcel.is_last) == (is_tuple, is_tuple)
    for found, sent in zip(parcel.tensors, tensors, strict=True):
        assert found.dtype == sent.dtype
        assert torch.equal(found, sent)


def test_what_comes_out_may_be_written_over():
    data = pack_parcel(Parcel(TENSORS[:1]))
    first = unpack_parcel(data).tensors[0]
    first.zero_()
    assert torch.equal(unpack_parcel(data).tensors[0], TENSORS[0])


def test_where_there_is_no_gradient_there_is_none():
    parcel = unpack_parcel(pack_parcel(Parcel((None, TENSORS[0], None), is_tuple=True)))
    assert parcel.tensors[0] is parcel.tensors[2] is None
    with pytest.raises(StorageError, match="without one of its tensors"):
        present(parcel.tensors)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"no frame at all",
        pack_parcel(Parcel(TENSORS))[:-1],
        encode({"5": frame_tensor(TENSORS[0])}, {"tuple": "2"}),
        encode({"0": frame_tensor(TENSORS[0])}, {"tuple": "999999999"}),
        encode({"0": frame_tensor(TENSORS[0])}, {"tuple": "-1"}),
        encode({"0": FrameTensor("float8_e5m2", (2,), b"12")}),
    ],
)
def test_what_is_no_message_is_refused(data):
    with pytest.raises(StorageError):
        unpack_parcel(data)
