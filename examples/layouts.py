"""What a prompt looks like to the model: places, distances and the mask, for each position strategy."""

from kvmosaic import Prompt
from kvmosaic.layout import arrange, dense

prompt = Prompt.from_tokens(system=[1, 2], chunks=[[3, 4, 5], [6, 7]], question=[8, 9], names=["a", "b"])

for strategy in ("shared", "sequential"):
    layout = arrange(prompt, strategy)
    print(strategy)
    for index, span in enumerate(layout.spans):
        name = span.segment.name or span.segment.kind
        print(f"  {name:<9} computed at {span.start}, seen at {layout.position_of(index)}")

for row in dense(arrange(prompt)).mask:
    print("  " + "".join("█" if seen else "·" for seen in row))
