"""Settings that contradict each other, in words: one of the two is not read. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection

from engine.config import EngineConfig

Rule = tuple[tuple[str, ...], Callable[[EngineConfig], bool], str]

_RULES: tuple[Rule, ...] = (
    (("kv_window", "kv_capacity"), lambda c: True, "the pool has the size of kv-capacity; kv-window is not read"),
    (
        ("retrieve", "prefill"),
        lambda c: c.retrieve == "off" and c.prefill == "recall",
        "recall is off: a recall prefill runs as window",
    ),
    (
        ("retrieve", "decode"),
        lambda c: c.retrieve == "off" and c.decode == "recall",
        "recall is off: a recall decode runs as window",
    ),
    (("retrieve", "scorer"), lambda c: c.retrieve == "off", "recall is off: scorer is not read"),
    (("retrieve", "retrieve_share"), lambda c: c.retrieve != "auto", "retrieve says it: retrieve-share is not read"),
    (("retrieve", "neighbor_pages"), lambda c: c.retrieve == "off", "recall is off: neighbor-pages is not read"),
    (
        ("ring", "kv_window"),
        lambda c: c.ring == "off",
        "the ring is off: the pool holds the whole context and kv-window is not read",
    ),
    (
        ("ring", "retrieve"),
        lambda c: c.ring == "off" and c.retrieve != "off",
        "the ring is off: nothing is ever cold, and retrieve is not read",
    ),
    *(
        (("ring", field), lambda c: c.ring == "off", f"the ring is off: nothing is ever cold, and {name} is not read")
        for field, name in (
            ("retrieve_share", "retrieve-share"),
            ("scorer", "scorer"),
            ("neighbor_pages", "neighbor-pages"),
        )
    ),
    (
        ("positions", "prefill"),
        lambda c: c.positions == "compact" and c.prefill == "exact",
        "compact positions have no exact prefill: every request would be refused",
    ),
    (
        ("positions", "decode"),
        lambda c: c.positions == "compact" and c.decode == "exact",
        "compact positions have no exact decode: every request would be refused",
    ),
    (
        ("positions", "scorer"),
        lambda c: c.positions == "compact" and c.scorer == "mass",
        "compact positions have no exact pass, which the scorer mass needs: every request would be refused",
    ),
    (
        ("device", "host_memory"),
        lambda c: c.device == "cpu" and c.host_memory == "pinned",
        "host memory is pinned for a card, and the device is the CPU",
    ),
    (("device", "cuda_graph"), lambda c: c.device == "cpu", "the device is the CPU: cuda-graph is not read"),
    (
        ("device_profile", "device_profile_path"),
        lambda c: c.device_profile == "off",
        "device profiles are off: device-profile-path is not read",
    ),
)


def conflicts(config: EngineConfig, given: Collection[str]) -> list[str]:
    """One line for each rule whose settings were all given (`given`: fields that are not at their default source)."""
    return [
        f"{' and '.join(field.replace('_', '-') for field in fields)}: {text}"
        for fields, broken, text in _RULES
        if set(fields) <= set(given) and broken(config)
    ]
