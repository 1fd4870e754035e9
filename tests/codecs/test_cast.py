"""The codec that casts to 16 bits."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from thinwire import Cast, OptionError

carriers = st.sampled_from([torch.float16, torch.bfloat16, torch.float32])


@given(carriers, st.lists(st.integers(-256, 256), max_size=9))
def test_numbers_that_fit_come_back_exactly(dtype: torch.dtype, numbers: list[int]) -> None:
    x = torch.tensor(numbers, dtype=torch.float32)
    assert torch.equal(Cast(dtype).decode(Cast(dtype).encode(x), into=torch.empty_like(x)), x)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_an_encoding_never_shares_memory_with_its_input(dtype: torch.dtype) -> None:
    x = torch.ones(3, dtype=dtype)
    Cast(dtype).encode(x)[0].zero_()
    assert x.tolist() == [1, 1, 1]


def test_complex_numbers_keep_their_imaginary_part() -> None:
    x = torch.tensor([1 + 2j, -3j])
    codec = Cast(torch.float16)
    (encoded,) = codec.encode(x)
    assert encoded.dtype == torch.float16
    assert torch.equal(codec.decode((encoded,), into=torch.empty_like(x)), x)


def test_inf_and_nan_stay_what_they_are() -> None:
    codec = Cast(torch.bfloat16)
    x = torch.tensor([math.inf, -math.inf, math.nan, 3e38])
    back = codec.decode(codec.encode(x), into=torch.empty_like(x))
    assert back[0] == math.inf
    assert back[1] == -math.inf
    assert back[2].isnan()
    assert back[3].isfinite()


def test_a_dtype_that_is_no_carrier_is_refused() -> None:
    with pytest.raises(OptionError, match=r"dtype=torch.int8 .* use one of torch.float16, torch.bfloat16"):
        Cast(torch.int8)
