"""Tokens a second against misses a token, drawn as SVG without any package."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 640, 360, 60, 20, 20, 50


def plot(rates: Sequence[Mapping[str, float]]) -> str:
    """Return an SVG: the rates measured, and what the reads alone would allow."""
    most_misses = max(rate["misses"] for rate in rates) or 1
    hits = rates[0]["step_ms"]
    ideal = [1000 / (hits + rate["reads_ms"]) for rate in rates]
    top = 1.1 * max(1000 / hits, *ideal)

    def at(misses: float, tokens: float) -> tuple[float, float]:
        x = LEFT + (WIDTH - LEFT - RIGHT) * misses / most_misses
        return x, HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * tokens / top

    box, font = f'viewBox="0 0 {WIDTH} {HEIGHT}"', 'font-family="sans-serif" font-size="12"'
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {box} {font}>',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
    ]
    for part in range(5):
        tokens = top * part / 4
        x, y = at(0, tokens)
        end = WIDTH - RIGHT
        lines.append(f'<path d="M{x:.1f} {y:.1f}H{end}" stroke="#ddd"/>')
        lines.append(f'<text x="{x - 6:.1f}" y="{y + 4:.1f}" text-anchor="end">{tokens:.0f}</text>')
    for rate in rates:
        x, y = at(rate["misses"], 0)
        lines.append(
            f'<text x="{x:.1f}" y="{y + 18:.1f}" text-anchor="middle">{rate["misses"]:g}</text>'
        )
    lines.append(
        f'<text x="{WIDTH / 2}" y="{HEIGHT - 10}" text-anchor="middle">misses a token</text>'
    )
    lines.append(f'<text x="{LEFT}" y="{TOP - 6}">tokens a second</text>')
    curves = (
        ("#888", "step without misses + reads alone", ideal),
        ("#06c", "measured", [rate["tokens_s"] for rate in rates]),
    )
    for number, (colour, name, values) in enumerate(curves):
        points = [at(rate["misses"], value) for rate, value in zip(rates, values, strict=True)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        lines.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        lines += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in points]
        y = TOP + 14 + 18 * number
        lines.append(
            f'<text x="{WIDTH - RIGHT}" y="{y}" text-anchor="end" fill="{colour}">{name}</text>'
        )
    return "\n".join([*lines, "</svg>"]) + "\n"
