"""The GPU cards that `gend plan` knows, one table, with the source of each number. Pure data.

Prices are what a card cost to rent when the table was written; they move weekly. Give the real offer to the plan.
"""

import re

import msgspec

from gend.errors import SettingsError


class Card(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of GPU. Rates are peak, dense (no structured sparsity), for one GPU."""

    name: str
    total_mib: int
    """Memory as nvidia-smi shows it: SGLang's default --mem-fraction-static is a share of this."""
    usable_gib: float
    """Free when SGLang begins to load weights ("Load weight begin. avail mem="): its budget is a share of this."""
    bytes_per_second: float
    bf16_flops: float
    fp8_flops: float
    """0 where the card has no FP8 tensor cores."""
    link_bytes_per_second: float
    """One way, to the other GPUs of the box: NVLink, or PCIe where there is none."""
    nvlink: bool
    dollars_per_hour: float
    measured: bool = False
    """True where the step-time constants in gend.plan were measured on this card."""
    sources: dict[str, str]


_LOG = "the line 'Load weight begin. avail mem=' of a public SGLang log: "
_DATASHEET = "NVIDIA's datasheet, dense (the printed figure with sparsity, halved)"
_SMI = "nvidia-smi"

CARDS = (
    Card(
        name="B200",
        total_mib=183_359,
        usable_gib=177.6,
        bytes_per_second=8.0e12,
        bf16_flops=2250e12,
        fp8_flops=4500e12,
        link_bytes_per_second=900e9,
        nvlink=True,
        dollars_per_hour=5.5,
        sources={
            "total_mib": _SMI,
            "usable_gib": _LOG + "177.57 (Qwen3-8B, April 2026)",
            "bytes_per_second": "NVIDIA's datasheet: 8 TB/s",
            "flops": "NVIDIA's datasheet, HGX B200 at 1000 W, dense",
            "link": "NVIDIA's datasheet: NVLink 5, 1.8 TB/s both ways",
            "dollars_per_hour": "an eighth of the $44 an hour that the project was offered for eight",
        },
    ),
    Card(
        name="H200",
        total_mib=143_771,
        usable_gib=139.2,
        bytes_per_second=4.8e12,
        bf16_flops=989e12,
        fp8_flops=1979e12,
        link_bytes_per_second=450e9,
        nvlink=True,
        dollars_per_hour=3.5,
        measured=True,
        sources={
            "total_mib": _SMI,
            "usable_gib": "fitted on the KV tokens of two measured servers with --mem-fraction-static 0.85 and 0.88",
            "bytes_per_second": "NVIDIA's datasheet: 4.8 TB/s",
            "flops": _DATASHEET,
            "link": "NVIDIA's datasheet: NVLink 4, 900 GB/s both ways",
            "dollars_per_hour": "specialised clouds, May 2026: $3.50 to $4.50",
        },
    ),
    Card(
        name="H100",
        total_mib=81_559,
        usable_gib=78.4,
        bytes_per_second=3.35e12,
        bf16_flops=989e12,
        fp8_flops=1979e12,
        link_bytes_per_second=450e9,
        nvlink=True,
        dollars_per_hour=2.5,
        sources={
            "total_mib": _SMI,
            "usable_gib": _LOG + "78.43 to 78.8",
            "bytes_per_second": "NVIDIA's datasheet, SXM: 3.35 TB/s",
            "flops": _DATASHEET,
            "link": "NVIDIA's datasheet: NVLink 4, 900 GB/s both ways",
            "dollars_per_hour": "specialised clouds, May 2026: $2.50 to $3.50",
        },
    ),
    Card(
        name="RTX PRO 6000",
        total_mib=97_887,
        usable_gib=94.1,
        bytes_per_second=1.792e12,
        bf16_flops=500e12,
        fp8_flops=1000e12,
        link_bytes_per_second=50e9,
        nvlink=False,
        dollars_per_hour=1.8,
        sources={
            "total_mib": _SMI,
            "usable_gib": _LOG + "94.14 to 94.63",
            "bytes_per_second": "NVIDIA's datasheet, Blackwell: 1,792 GB/s",
            "flops": "an eighth and a quarter of the 4,000 TOPS that the datasheet gives for FP4 with sparsity",
            "link": "PCIe 5.0 x16, 64 GB/s one way less overhead",
            "dollars_per_hour": "a guess between H100 and L40S: no price list was at hand",
        },
    ),
    Card(
        name="A100",
        total_mib=81_920,
        usable_gib=78.7,
        bytes_per_second=2.039e12,
        bf16_flops=312e12,
        fp8_flops=0.0,
        link_bytes_per_second=300e9,
        nvlink=True,
        dollars_per_hour=1.3,
        sources={
            "total_mib": _SMI,
            "usable_gib": "nvidia-smi less 1.3 GiB, as on the H100",
            "bytes_per_second": "NVIDIA's datasheet, 80 GB SXM: 2,039 GB/s",
            "flops": "NVIDIA's datasheet, dense; Ampere has no FP8",
            "link": "NVIDIA's datasheet: NVLink 3, 600 GB/s both ways",
            "dollars_per_hour": "specialised clouds, May 2026: $1.10 to $1.50",
        },
    ),
    Card(
        name="L40S",
        total_mib=46_068,
        usable_gib=44.0,
        bytes_per_second=0.864e12,
        bf16_flops=362e12,
        fp8_flops=733e12,
        link_bytes_per_second=25e9,
        nvlink=False,
        dollars_per_hour=0.8,
        sources={
            "total_mib": _SMI,
            "usable_gib": _LOG + "44.02",
            "bytes_per_second": "NVIDIA's datasheet: 864 GB/s",
            "flops": _DATASHEET,
            "link": "PCIe 4.0 x16, 32 GB/s one way less overhead",
            "dollars_per_hour": "the cheapest list price found, March 2026: $0.79",
        },
    ),
)


_NOT_TELLING = re.compile(r"nvidia|sxm\d?|hbm3e?|(?:48|80|96|141|180|192)gb|blackwell|server|edition|")


def find_card(name: str) -> Card:
    """The card of that name, as people or the driver write it ("rtx-pro-6000", "NVIDIA H100 80GB HBM3").

    Raises SettingsError for any other: an H100 PCIe or a GH200 is not the card in the table.
    """
    words = re.split(r"[^a-z0-9]+", name.lower())
    wanted = "".join(word for word in words if not _NOT_TELLING.fullmatch(word))
    for card in CARDS:
        if wanted == card.name.lower().replace(" ", ""):
            return card
    raise SettingsError(f"card {name!r} is not in the table; known are {', '.join(card.name for card in CARDS)}")
