"""`moe-ep doctor` on a machine with GPUs: what the other tests here use, it finds."""

from __future__ import annotations

import pytest
import torch

from moe_ep import _native
from moe_ep.doctor import hardware, report
from moe_ep.doctor.machine import Machine

pytestmark = pytest.mark.gpu


def test_gpus_kernels_and_shared_memory_are_found() -> None:
    if _native.load() is None:
        pytest.skip("needs moe_ep._C: make test-gpu builds it")
    findings = report.examine(Machine())
    assert not report.unmet(findings, ["cuda"]), findings
    by_subject = {finding.subject: finding for finding in findings}
    assert by_subject["GPU"].sentence.startswith(f"{torch.cuda.device_count()} x "), by_subject["GPU"]
    assert by_subject["kernels"].state == "ok", by_subject["kernels"]
    assert by_subject["IPC"].state == "ok", by_subject["IPC"]
    assert not [finding for finding in findings if "failed itself" in finding.sentence]


def test_the_links_of_the_driver_are_understood() -> None:
    text = Machine().output("nvidia-smi", "nvlink", "-s")
    if not text or "Link 0" not in text:
        pytest.skip("needs GPUs with NVLink, and nvidia-smi")
    (finding,) = hardware.nvlink(Machine())
    assert " GB/s" in finding.sentence, (finding, text)
