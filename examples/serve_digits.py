r"""Serve what examples/digits.py learned: images in, digits out; no replica runs while no request comes.

springtide run examples/digits.py && springtide deploy examples/serve_digits.py

The second command prints how to call it, with this platform's address and token file:

curl -s http://127.0.0.1:8787/f/digit-reader -H "Authorization: Bearer $(cat ~/.local/state/springtide/token)" \
    -d '{"images": [[0, 0.3, ... 64 numbers from 0 to 1]]}'
"""

from __future__ import annotations

import torch
from safetensors.torch import load_file

import springtide as st
from digits import Net


@st.serve(slo="p99 < 200ms", scale=(0, 2), idle="30s", name="digit-reader")
class DigitReader:
    """List in, list out: images of requests that arrive together are read together."""

    def load(self) -> None:
        """Once for each replica, before it gets a request."""
        self.net = Net().eval()
        self.net.load_state_dict(load_file(st.model_path("digits")))

    @torch.inference_mode()
    def predict(self, images: list[list[float]]) -> list[int]:
        """The digit that each image shows; an image is 64 grey values from 0 (white) to 1 (black), row by row."""
        return [int(digit) for digit in self.net(torch.tensor(images)).argmax(dim=1)]
