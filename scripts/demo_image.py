"""Draws the first questions of `kvmosaic demo` as docs/images/demo.svg, without fonts from the network.

python scripts/demo_image.py [MODEL]
"""

import io
import os
import sys
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import TerminalTheme

from kvmosaic.console.demo import VISITS, run_demo
from kvmosaic.console.folder import bundled_documents
from kvmosaic.console.options import ModelOptions

OUTPUT = Path(__file__).parents[1] / "docs" / "images" / "demo.svg"
THEME = TerminalTheme((27, 31, 36), (214, 219, 224), [(69, 76, 84)] * 8)
FORMAT = """<svg viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg" role="img" \
aria-label="kvmosaic demo: questions, answers, and what was reused">
<style>.{unique_id}-matrix {{ font-family: "SFMono-Regular", "DejaVu Sans Mono", Menlo, Consolas, monospace; \
font-size: {char_height}px; line-height: {line_height}px; }}
{styles}</style>
<defs><clipPath id="{unique_id}-clip-terminal"><rect x="0" y="0" width="{terminal_width}" \
height="{terminal_height}" /></clipPath>{lines}</defs>
{chrome}<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}<g class="{unique_id}-matrix">{matrix}</g></g></svg>
"""


def main() -> None:
    """Runs the demo into a recording console and saves the picture."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as the command does
    model = sys.argv[1] if len(sys.argv) > 1 else "reader"
    console = Console(record=True, width=100, force_terminal=True, color_system="truecolor", file=io.StringIO())
    run_demo(ModelOptions(model, {"position_strategy": "sequential"}), bundled_documents(), VISITS[:3], console)
    console.save_svg(str(OUTPUT), title="kvmosaic demo", code_format=FORMAT, theme=THEME, unique_id="demo")


if __name__ == "__main__":
    main()
