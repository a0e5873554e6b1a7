"""Draw the figures of the guide: `python docs/guide/pictures.py`. Each is an SVG for light and for dark screens."""

import math
from pathlib import Path

HERE = Path(__file__).parent
STYLE = """
.card{fill:#ffffff;stroke:#d0d7de} .frame{fill:none;stroke:#8c959f;stroke-width:1.5}
.text{fill:#1f2328;font:15px sans-serif} .small{fill:#57606a;font:13px sans-serif}
.label{fill:#1f2328;font:13px sans-serif} .bold{font-weight:bold}
.code{fill:#1f2328;font:14px monospace}
.a{fill:#bcd9ff} .b{fill:#ffd9a8} .c{fill:#bfe5c7} .d{fill:#e4d3f5} .e{fill:#e6e9ed} .bad{fill:#ffc9c9}
.line{stroke:#57606a;stroke-width:1.5;fill:none} .head{fill:#57606a}
.thick-a{stroke:#2f6fd0;stroke-width:3;fill:none} .thick-b{stroke:#c2670c;stroke-width:3;fill:none}
.thick-c{stroke:#2a8a43;stroke-width:3;fill:none} .grid{stroke:#d0d7de;stroke-width:1}
.wrong{stroke:#c62828;stroke-width:2;fill:none;stroke-dasharray:6 4}
@media (prefers-color-scheme: dark){
.card{fill:#161b22;stroke:#30363d} .frame{stroke:#8b949e}
.text{fill:#e6edf3} .small{fill:#a3adb8} .label{fill:#e6edf3} .code{fill:#e6edf3}
.a{fill:#1f4a86} .b{fill:#80480f} .c{fill:#1d6136} .d{fill:#573b7d} .e{fill:#32383f} .bad{fill:#8a2626}
.line{stroke:#a3adb8} .head{fill:#a3adb8}
.thick-a{stroke:#6aa8ff} .thick-b{stroke:#f0a04b} .thick-c{stroke:#5fce7e} .grid{stroke:#30363d}
.wrong{stroke:#ff7b7b}}
"""


class Picture:
    """A figure of `width` x `height` points, with a title for readers that cannot see it."""

    def __init__(self, width, height, title):
        self.width, self.height, self.title, self.parts = width, height, title, []

    def box(self, x, y, width, height, kind="e", text="", size="text"):
        self.parts.append(f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="4" class="{kind}"/>')
        lines = text.split("\n") if text else []
        for number, line in enumerate(lines):
            self.text(x + width / 2, y + height / 2 + 5 + 18 * (number - (len(lines) - 1) / 2), line, size, "middle")

    def text(self, x, y, text, kind="text", anchor="start"):
        text = text.replace("&", "&amp;").replace("<", "&lt;")
        self.parts.append(f'<text x="{x:g}" y="{y:g}" class="{kind}" text-anchor="{anchor}">{text}</text>')

    def line(self, points, kind="line"):
        self.parts.append(f'<polyline points="{" ".join(f"{x:g},{y:g}" for x, y in points)}" class="{kind}"/>')

    def arrow(self, x0, y0, x1, y1, kind="line"):
        self.line([(x0, y0), (x1, y1)], kind)
        angle = math.atan2(y1 - y0, x1 - x0)
        wings = [(x1 - 9 * math.cos(angle + turn), y1 - 9 * math.sin(angle + turn)) for turn in (-0.45, 0.45)]
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in [(x1, y1), *wings])
        self.parts.append(f'<polygon points="{points}" class="head"/>')

    def save(self, name):
        card = f'<rect x="0.5" y="0.5" width="{self.width - 1}" height="{self.height - 1}" rx="8" class="card"/>'
        head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" role="img">'
        body = "\n".join([head, f"<title>{self.title}</title>", f"<style>{STYLE}</style>", card, *self.parts, "</svg>"])
        (HERE / f"{name}.svg").write_text(body + "\n")


def ranks():
    picture = Picture(760, 300, "One command starts two processes, which have nothing in common but messages")
    picture.box(20, 120, 170, 60, "e", "torchrun\n--nproc-per-node 2", "code")
    for rank, kind in enumerate("ab"):
        y = 25 + 135 * rank
        picture.arrow(190, 150, 256, y + 57)
        picture.box(260, y, 480, 115, "frame")
        picture.text(275, y + 23, f"process of rank {rank}", "text bold")
        picture.box(275, y + 35, 140, 65, kind, "the script,\nfrom its first line")
        picture.box(425, y + 35, 145, 65, kind, "its own copy\nof the weights")
        picture.box(580, y + 35, 145, 65, kind, "its own shard\nof the data")
    picture.arrow(497, 160, 497, 140)
    picture.arrow(497, 140, 497, 160)
    picture.text(510, 155, "messages: broadcast, all_reduce", "small")
    picture.text(20, 205, "RANK=0 or 1", "code")
    picture.text(20, 225, "WORLD_SIZE=2", "code")
    picture.save("ranks")


def step():
    picture = Picture(
        760, 290, "A data-parallel step: exclusive shards, the same weights, summed gradients, the same update"
    )
    for x, name in ((20, "shard of the batch"), (170, "forward"), (300, "backward"), (600, "update")):
        picture.text(x + 5, 35, name, "small")
    for rank, kind in enumerate("ab"):
        y = 55 + 115 * rank
        picture.box(20, y, 120, 80, kind, "samples\n0, 2, 4 ..." if rank == 0 else "samples\n1, 3, 5 ...")
        picture.box(170, y, 100, 80, "e", f"weights w\nof rank {rank}")
        picture.box(300, y, 100, 80, kind, f"gradient\nof rank {rank}")
        picture.box(600, y, 140, 80, "c", "w - rate x g\nthe same bits")
        picture.arrow(140, y + 40, 167, y + 40)
        picture.arrow(270, y + 40, 297, y + 40)
        picture.arrow(400, y + 40, 437, y + 40)
        picture.arrow(560, y + 40, 597, y + 40)
    picture.box(440, 55, 120, 195, "d", "all_reduce:\ng = the sum of\nboth gradients\n\non both ranks")
    picture.text(
        20, 275, "Only gradients are sent. Weights stay equal, because equal weights get equal updates.", "small"
    )
    picture.save("step")


def accumulation():
    picture = Picture(760, 300, "Four micro-batches and one all-reduce, against an all-reduce after each of them")
    for top, name, every in ((45, "no_sync until the last micro-batch", False), (175, "no_sync forgotten", True)):
        picture.text(20, top - 12, name, "text bold")
        for rank, kind in enumerate("ab"):
            x, y = 90, top + 45 * rank
            picture.text(20, y + 24, f"rank {rank}")
            for number in range(4):
                picture.box(x, y, 80, 36, kind, f"micro {number + 1}", "label")
                x += 84
                if every or number == 3:
                    if rank == 0:
                        picture.box(x, y, 60, 81, "bad" if every else "d", "all_\nreduce", "label")
                    x += 64
            picture.box(x, y, 64, 36, "c", "update", "label")
    picture.text(
        20, 285, "The result is the same. The second way sends four times as much, and waits four times.", "small"
    )
    picture.save("accumulation")


def precision():
    picture = Picture(760, 250, "The order of a step in fp16: scale, backward, add, unscale, test, clip, update")
    boxes = [
        ("loss\nx 65536", "b"),
        ("backward\nin 16 bits", "b"),
        ("add over\nthe ranks", "d"),
        ("divide by\n65536", "a"),
        ("all finite?", "a"),
        ("clip by\nthe norm", "a"),
        ("update in\n32 bits", "c"),
    ]
    for number, (text, kind) in enumerate(boxes):
        x = 18 + 105 * number
        picture.box(x, 70, 90, 70, kind, text)
        if number:
            picture.arrow(x - 15, 105, x - 2, 105)
    picture.text(18, 45, "scaled: too large for the norm, and large enough for 16 bits", "small")
    picture.text(333, 165, "true size again", "small")
    picture.line([(18, 55), (318, 55)])
    picture.line([(333, 150), (738, 150)])
    picture.line([(483, 140), (483, 205)], "wrong")
    picture.text(483, 225, "no: leave this update out on all ranks, and halve the scale", "small", "middle")
    picture.save("precision")


def sharding():
    picture = Picture(760, 320, "What each of four GPUs keeps with DDP and with FSDP")
    parts = (("weights", "a", 1), ("gradients", "b", 1), ("Adam's two averages", "d", 2))
    for column, (name, share) in enumerate((("DDP: everything on each rank", 1), ("FSDP: a quarter on each rank", 4))):
        left = 30 + 330 * column
        picture.text(left, 35, name, "text bold")
        for rank in range(4):
            bottom = 270
            for _, kind, amount in parts:
                height = 52 * amount / share
                bottom -= height
                picture.box(left + 75 * rank, bottom, 60, height, kind)
            picture.text(left + 75 * rank + 30, 290, f"rank {rank}", "small", "middle")
    picture.box(360, 165, 300, 26, "frame", "and one block, gathered while it computes", "label")
    for number, (name, kind, _) in enumerate(reversed(parts)):
        picture.box(380, 62 + 28 * number, 18, 18, kind)
        picture.text(406, 76 + 28 * number, name, "small")
    picture.save("sharding")


def order():
    picture = Picture(760, 300, "The order of an epoch is cut by global batches first, and by ranks then")
    samples = [13, 5, 22, 0, 17, 9, 3, 20, 11, 6, 23, 1, 15, 8, 19, 2, 12, 21, 4, 16, 7, 10, 18, 14]
    kinds = "abcd"
    for top, world in ((50, 2), (160, 4)):
        picture.text(20, top - 12, f"{world} ranks", "text bold")
        for place, sample in enumerate(samples):
            x = 20 + 30 * place
            picture.box(x, top, 26, 40, kinds[place % world], str(sample), "label")
        for batch in range(3):
            x = 20 + 240 * batch
            picture.line([(x, top + 46), (x, top + 52), (x + 236, top + 52), (x + 236, top + 46)])
            picture.text(x + 118, top + 70, f"step {batch}", "small", "middle")
    for rank, kind in enumerate(kinds):
        picture.box(20 + 120 * rank, 258, 18, 18, kind)
        picture.text(46 + 120 * rank, 272, f"rank {rank}", "small")
    picture.text(500, 272, "A step has the same samples.", "small")
    picture.save("order")


def evaluation():
    picture = Picture(760, 270, "Ten samples, once each; and padded to full batches, where six count twice")
    for top, name, padded in ((50, "each sample once: 10 counted", False), (165, "full batches: 16 counted", True)):
        picture.text(20, top - 12, name, "text bold")
        for rank, kind in enumerate("ab"):
            y = top + 38 * rank
            picture.text(20, y + 22, f"rank {rank}")
            for place in range(8 if padded else 5):
                sample = 2 * place + rank
                again = sample >= 10
                x = 90 + 60 * place + (20 if place >= 4 else 0)
                picture.box(x, y, 54, 30, "bad" if again else kind, str(sample % 10), "label")
    picture.text(600, 190, "red: counted", "small")
    picture.text(600, 208, "for the second time", "small")
    picture.save("evaluation")


def checkpoints():
    picture = Picture(760, 260, "A power failure in the middle of the second save, and the second start")
    picture.text(20, 50, "first start", "text bold")
    picture.line([(130, 45), (460, 45)], "thick-a")
    picture.text(20, 150, "second start", "text bold")
    picture.line([(290, 145), (650, 145)], "thick-a")
    for x, name in ((130, "step 0"), (290, "step 10"), (450, "step 20"), (650, "step 30")):
        picture.line([(x, 60), (x, 155 if name == "step 20" else 200)], "grid")
        picture.text(x, 220, name, "small", "middle")
    picture.box(262, 70, 56, 34, "c", "saved", "label")
    picture.box(402, 70, 96, 34, "bad", "half a file", "label")
    picture.text(510, 92, "power failure: never renamed", "small")
    picture.arrow(290, 104, 290, 136)
    picture.box(600, 165, 130, 34, "c", "the same weights", "label")
    picture.text(300, 170, "model, optimizer and step from the file", "small")
    picture.text(300, 188, "order from the step", "small")
    picture.save("checkpoints")


def hanging():
    picture = Picture(760, 250, "Rank 1 leaves out step 5. From then on, gradients of different steps are added")
    for rank, kind in enumerate("ab"):
        y = 50 + 100 * rank
        picture.text(20, y + 24, f"rank {rank}", "text bold")
        steps = [3, 4, 5, 6, 7, 8] if rank == 0 else [3, 4, 6, 7, 8]
        for place, step in enumerate(steps):
            picture.box(100 + 95 * place, y, 75, 36, kind, f"step {step}", "label")
    for place in range(5):
        x = 137 + 95 * place
        picture.line([(x, 86), (x, 150)], "wrong" if place >= 2 else "line")
    picture.line([(612, 86), (612, 120)], "wrong")
    picture.text(612, 140, "waits", "small", "middle")
    picture.text(
        100, 225, "Each pair has the right shape, so nothing complains: the update is wrong, and silent.", "small"
    )
    picture.save("hanging")


def scaling():
    picture = Picture(760, 360, "Amdahl's law: speed-up against the number of ranks, for shares that cannot be divided")
    left, bottom, width, height, most = 80, 300, 520, 250, 9  # axes to 2 ** most ranks, in powers of two

    def place(ranks, speed):
        return left + width * math.log2(ranks) / most, bottom - height * math.log2(speed) / most

    for power in range(most + 1):
        x, y = place(2**power, 2**power)
        picture.line([(x, bottom), (x, bottom - height)], "grid")
        picture.line([(left, y), (left + width, y)], "grid")
        picture.text(x, bottom + 20, str(2**power), "small", "middle")
        if power % 3 == 0:
            picture.text(left - 10, y + 5, f"{2**power}x", "small", "end")
    for serial, kind, name in ((0, "thick-c", "all of it"), (0.01, "thick-a", "99 %"), (0.1, "thick-b", "90 %")):
        curve = [place(ranks, 1 / (serial + (1 - serial) / ranks)) for ranks in range(1, 2**most + 1)]
        picture.line(curve, kind)
        picture.text(left + width + 10, curve[-1][1] + 5, name)
    picture.text(left + width + 10, 35, "can be divided:", "small")
    picture.text(left + width / 2, 345, "ranks", "small", "middle")
    picture.text(20, 30, "times as fast as one rank", "small")
    picture.save("scaling")


def tokens():
    picture = Picture(
        760,
        270,
        "Four micro-batches with 3, 13, 212 and 292 tokens: by the mean of means, each has a quarter of the loss",
    )
    counts, kinds, left, width = (3, 13, 212, 292), "bdac", 20, 720
    rows = (
        (45, "tokens of four micro-batches", counts),
        (150, "their shares of the loss by the mean of means", (1, 1, 1, 1)),
    )
    for top, name, shares in rows:
        picture.text(left, top - 12, name, "text bold")
        x = left
        for count, share, kind in zip(counts, shares, kinds, strict=True):
            size = width * share / sum(shares)
            picture.box(round(x, 1), top, round(size, 1), 44, kind, str(count) if size > 30 else "", "label")
            x += size
    picture.text(left, 112, "3 and 13", "small")
    picture.text(
        left,
        225,
        "A token of the first weighs 43.33 times, and a token of the last 0.45 times what it should.",
        "small",
    )
    picture.text(left, 250, "Right: each sum is divided by all 520 tokens, on all ranks.", "small")
    picture.save("tokens")


def ddp():
    picture = Picture(760, 250, "DDP averages a bucket of gradients while the backward pass computes the next one")
    layers = ("layer 3", "layer 2", "layer 1")
    for rank, kind in enumerate("ab"):
        y = 50 + 125 * rank
        picture.text(20, y + 24, f"rank {rank}", "text bold")
        for number, layer in enumerate(layers):
            picture.box(95 + 125 * number, y, 115, 36, kind, f"backward {layer}", "label")
        picture.box(640, y, 100, 36, "c", "update", "label")
    for number in range(3):
        x = 220 + 125 * number + (20 if number == 2 else 0)
        picture.box(x, 103, 115, 55, "d", f"all_reduce of\nbucket {number}", "label")
        picture.arrow(210 + 125 * number, 86, x + 12, 101)
        picture.arrow(210 + 125 * number, 175, x + 12, 160)
    picture.line([(605, 130), (690, 130)])
    picture.arrow(690, 130, 690, 90)
    picture.arrow(690, 130, 690, 171)
    picture.text(20, 25, "time", "small")
    picture.arrow(55, 20, 740, 20)
    picture.text(95, 238, "While a rank computes, it also sends. Only the last bucket needs more time.", "small")
    picture.save("ddp")


def over_time():
    picture = Picture(
        760, 300, "Two ranks gather block after block, compute all of them, and gather them again for the backward pass"
    )
    columns = [("1", "f"), ("2", "f"), ("3", "f"), ("3", "b"), ("2", "b"), ("1", "b")]
    picture.text(110, 30, "forward", "text bold")
    picture.text(425, 30, "backward", "text bold")
    for rank, kind in enumerate("ab"):
        y = 50 + 115 * rank
        picture.text(20, y + 24, f"rank {rank}", "text bold")
        picture.text(20, y + 44, "its samples", "small")
        for place, (block, direction) in enumerate(columns):
            x = 110 + 105 * place
            picture.box(x, y, 95, 30, "d", f"gather {block}", "label")
            picture.box(x, y + 32, 95, 30, kind, f"compute {block}", "label")
            picture.box(x, y + 64, 95, 26, "e", f"free {block}" if direction == "f" else f"scatter {block}", "label")
    picture.text(
        110, 282, "Each rank computes every block, and owns half of it. Each block is gathered twice.", "small"
    )
    picture.save("over_time")


def below():
    picture = Picture(
        760,
        235,
        "Twelve ranks on three machines: the rank is four times the number of the machine, plus the local rank",
    )
    for machine, kind in enumerate("abc"):
        x = 20 + 245 * machine
        picture.box(x, 45, 230, 135, "frame")
        picture.text(x + 12, 70, f"machine {machine}", "text bold")
        for local in range(4):
            picture.box(x + 10 + 54 * local, 85, 48, 45, kind, f"rank\n{4 * machine + local}", "label")
            picture.text(x + 34 + 54 * local, 150, f"local {local}", "small", "middle")
        picture.text(x + 12, 172, "4 processes, 4 GPUs", "small")
    picture.text(20, 25, "WORLD_SIZE=12, LOCAL_WORLD_SIZE=4", "code")
    picture.text(20, 212, "RANK = 4 x machine + LOCAL_RANK. The GPU of a process is LOCAL_RANK.", "small")
    picture.save("below")


if __name__ == "__main__":
    for draw in (
        ranks,
        step,
        accumulation,
        precision,
        sharding,
        order,
        evaluation,
        checkpoints,
        hanging,
        scaling,
        tokens,
        ddp,
        over_time,
        below,
    ):
        draw()
