"""The risk: a card, a driver or its absence is read as something else."""

from __future__ import annotations

import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.platform.facts import parse_capability, slug
from engine.platform.nvidia import NO_DRIVER, read_cards
from engine.units import GIB
from tests.machines import RTX_3060, NVMLError, nvml


def smi(stdout: str = "", code: int = 0):
    return lambda command: subprocess.CompletedProcess(command, code, stdout, "")


def no_smi(command):
    raise FileNotFoundError(command[0])


def test_nvml_is_read_as_it_is():
    assert read_cards(nvml(), no_smi)[0] == (RTX_3060,)
    tcc = read_cards(nvml(nvmlDeviceGetCurrentDriverModel=1), no_smi)[0][0]
    assert tcc.driver_model == "TCC"


def test_what_one_card_does_not_answer_is_unknown_and_the_rest_is_read():
    unsupported = NVMLError("Not Supported")
    (card,), driver = read_cards(
        nvml(nvmlDeviceGetCurrentDriverModel=unsupported, nvmlDeviceGetCudaComputeCapability=unsupported), no_smi
    )
    assert (card.driver_model, card.capability, card.multiprocessors) == (None, None, None)
    assert card.total == 12 * GIB and driver.cuda == "12.9"


def test_without_nvml_the_table_of_nvidia_smi_serves():
    row = "0, NVIDIA GeForce RTX 3060, 8.6, 12288, 1024, 4, 16, Enabled, WDDM, 576.52\n"
    for module in (None, nvml(nvmlInit=NVMLError("NVML Shared Library Not Found"))):
        (card,), driver = read_cards(module, smi(row))
        assert (card.name, card.capability, card.total, card.display) == (RTX_3060.name, "8.6", 12 * GIB, True)
        assert driver.version == "576.52"


def test_no_driver_at_all_is_no_card_and_not_a_fault():
    cards, driver = read_cards(nvml(nvmlInit=NVMLError("NVML Shared Library Not Found")), no_smi)
    assert cards == () and driver.trouble == NO_DRIVER
    assert read_cards(None, no_smi)[1].trouble == NO_DRIVER


def test_a_folder_of_the_path_that_is_shut_is_no_broken_driver(tmp_path, monkeypatch):
    """Starting a program that is nowhere says "permission denied" where such a folder was searched."""

    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(subprocess, "run", refuse)
    assert read_cards(None)[1].trouble == NO_DRIVER


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.", 9),
        ('Field "compute_cap" is not a valid field to query.', 2),
        ("Unable to determine the device handle for GPU0: Unknown Error", 0),
        ("", 0),
    ],
)
def test_an_error_text_of_nvidia_smi_is_trouble_and_never_a_card(text, code):
    cards, driver = read_cards(nvml(nvmlInit=NVMLError("Driver/library version mismatch")), smi(text, code))
    assert cards == () and "version mismatch" in driver.trouble and driver.trouble != NO_DRIVER


def test_an_error_in_one_field_is_unknown():
    row = "0, NVIDIA T400, [N/A], [Not Supported], 100, 3, 16, [N/A], [N/A], Unknown Error"
    (card,), driver = read_cards(None, smi(row))
    assert (card.capability, card.total, card.display, card.driver_model) == (None, None, None, None)
    assert driver.version is None


@given(st.text(max_size=12))
def test_only_a_capability_is_parsed_as_one(text):
    found = parse_capability(text)
    assert found is None or (found.split(".")[0].isdigit() and float(found) < 100)


def test_names_become_rows_of_the_profiles():
    assert RTX_3060.hardware_class == "nvidia-geforce-rtx-3060-sm86"
    assert slug("Intel(R) Core(TM) i7 ") == "intel-r-core-tm-i7"
