"""The Python of the pages that users read, by heading."""

import pathlib
import re
from typing import NamedTuple

ROOT = pathlib.Path(__file__).parents[2]
PAGES = ROOT / "README.md", ROOT / "jax_flash" / "README.md"
GALLERY = ROOT / "jax_flash" / "GALLERY.md"


class Block(NamedTuple):
    """Lines of Python, below as many empty ones as stand above it on its page."""

    code: str
    page: pathlib.Path

    def run(self, names: dict) -> None:
        """Errors name page and line."""
        exec(compile(self.code, self.page, "exec"), names)


def sections(pages: tuple[pathlib.Path, ...] = PAGES) -> dict[str, list[Block]]:
    """Blocks by the heading above them, "" where there is none yet."""
    found: dict[str, list[Block]] = {}
    for page in pages:
        text = page.read_text()
        for block in re.finditer(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
            headings = re.findall(r"^## (.*)$", text[: block.start()], re.MULTILINE)
            heading = ["", *headings][-1]
            above = "\n" * text.count("\n", 0, block.start(1))
            found.setdefault(heading, []).append(Block(above + block[1], page))
    return found


def block_that_imports(module: str) -> Block:
    """The one block that does, which tests of that module run."""
    (block,) = (x for blocks in sections().values() for x in blocks if f"import {module}" in x.code)
    return block
