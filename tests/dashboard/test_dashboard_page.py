"""The page in a real browser: what it shows is what the engine did and what the gRPC API says."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from live_server import run
from playwright.async_api import Page
from watched import Gate, Witness, browsing, cost_table, serving_watched, shows, streaming

from dcut_trt.backends.scripted import scripted_engine

TOTALS = ("steps", "requests_finished", "prompt_tokens", "output_tokens", "drafted", "verified", "accepted")

# What every block of every strip looks like, newest step first: read back from the pixels.
READ_STRIPS = """(draftLength) => {
  const style = getComputedStyle(document.documentElement);
  const rgb = (name) => {
    const hex = style.getPropertyValue(name).trim();
    return [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16)).join();
  };
  const kinds = { [rgb("--accepted")]: "accepted", [rgb("--rejected")]: "rejected", [rgb("--pruned")]: "pruned" };
  return Object.fromEntries([...document.querySelectorAll(".strip")].map((row) => {
    const canvas = row.querySelector("canvas");
    const pixels = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
    const pitch = canvas.height / draftLength;
    const kind = (x, y) => {
      const at = 4 * (y * canvas.width + x);
      const [red, green, blue, alpha] = pixels.slice(at, at + 4);
      return alpha ? kinds[[red, green, blue].join()] ?? "unknown" : "empty";
    };
    const steps = [];
    for (let x = canvas.width - 7; x >= 0; x -= 9) {
      const blocks = [];
      for (let depth = 0; depth < draftLength; depth += 1) {
        const y = canvas.height - (depth + 1) * pitch;
        const [edge, middle] = [kind(x, y + 1), kind(x + 3, y + 1)];
        blocks.push(edge === "pruned" && middle === "empty" ? "pruned" : edge === middle ? edge : "unknown");
      }
      steps.push(blocks);
    }
    return [row.dataset.id, { steps, live: !row.classList.contains("ended") }];
  }));
}"""


async def number(page: Page, element: str) -> int:
    return int((await page.text_content(f"#{element}") or "").replace(",", ""))


def test_totals_and_live_numbers_are_those_of_get_info_and_usage() -> None:
    async def scenario() -> None:
        engine = scripted_engine(max_batch=4, max_len=1024, delay_s=0.02)
        gate = Gate(engine)
        async with serving_watched(engine) as (_, client, url), browsing(url) as page:
            await shows(page, "state", "serving")
            async with streaming(client, 6, 400) as streams:
                await shows(page, "running", "4")
                await shows(page, "waiting", "2")
                await gate.close()
                await shows(page, "steps", f"{engine.trace.totals.steps:,}")
                info = await client.info()
                assert [await number(page, name) for name in TOTALS] == [getattr(info.totals, name) for name in TOTALS]
                assert await number(page, "free_kv_blocks") == info.gauges.free_kv_blocks
                engine.target.delay_s = 0.0
                gate.open()
                answers = await asyncio.gather(*streams)
                await shows(page, "requests_finished", "6")
                await shows(page, "running", "0")
                output_tokens = sum(answer.usage.output_tokens for answer in answers)
                assert await number(page, "output_tokens") == output_tokens == 6 * 400
                assert await number(page, "accepted") == sum(answer.usage.accepted for answer in answers)
                assert await page.text_content("#policy") == "ratio:0.5"
                assert await page.text_content("#backend") == "scripted, fp32"

    run(scenario)


@pytest.mark.parametrize("draft_length", [7, 15])
def test_every_step_of_a_strip_is_accepted_rejected_and_pruned_blocks_that_add_up(draft_length: int) -> None:
    async def scenario() -> None:
        engine = scripted_engine(draft_length=draft_length, max_len=1024, delay_s=0.002)
        gate, witness = Gate(engine), Witness()
        async with serving_watched(engine) as (_, client, url), browsing(url) as page:
            await shows(page, "empty_title", "Nothing is running.")
            engine.trace.listeners = [*engine.trace.listeners, witness]
            async with streaming(client, 5, 600):
                await page.wait_for_function("() => document.querySelectorAll('.strip').length === 5")
                await page.wait_for_function(
                    "() => [...document.querySelectorAll('.tokens')].every((e) => parseInt(e.textContent) > 60)"
                )
                await gate.close()
                await page.wait_for_function(
                    "(tokens) => [...document.querySelectorAll('.strip')].every("
                    "(e) => e.querySelector('.tokens').textContent === `${tokens[e.dataset.id]} tok`)",
                    arg=witness.tokens,
                )
                strips = await page.evaluate(READ_STRIPS, draft_length)
                assert set(strips) == {f"stream-{index}" for index in range(5)}
                for request_id, strip in strips.items():
                    newest_first = witness.steps[request_id][::-1]
                    assert len(newest_first) > 5
                    for blocks, (accepted, verified) in zip(strip["steps"], newest_first, strict=False):
                        assert blocks == (
                            ["accepted"] * accepted
                            + ["rejected"] * (verified - accepted)
                            + ["pruned"] * (draft_length - verified)
                        )
                gate.open()
            await page.wait_for_function("() => document.querySelectorAll('.strip').length === 0")

    run(scenario)


def test_cost_table_is_that_of_the_api_with_the_used_cell_outlined() -> None:
    async def scenario() -> None:
        engine = scripted_engine("ratio:0.75", max_len=1024, delay_s=0.01)
        engine.cost_table = cost_table()
        async with serving_watched(engine) as (_, client, url), browsing(url) as page:
            await shows(page, "table_state", "measured")
            cells = await page.eval_on_selector_all(
                "#cost_table td[data-ratio]",
                "all => all.map((e) => [e.parentElement.dataset.batch, e.dataset.ratio, e.title, e.textContent])",
            )
            table = await client.cost_table()
            expected = []
            for row in table.rows:
                names = ("plain", "0.25", "0.5", "0.75", "1")
                costs = zip(names, (row.plain_ms, *row.cost_ms), strict=True)
                expected += [[str(row.batch), name, f"{cost:.3f} ms"] for name, cost in costs]
            assert [cell[:3] for cell in cells] == expected
            assert [cell[3] for cell in cells][-2:] == ["56.6", "134"]
            assert await page.query_selector("#cost_table td.used") is None  # nothing runs
            async with streaming(client, 3, 900):
                used = await page.wait_for_selector("#cost_table tr[data-batch='4'] td.used")  # captured nearest to 3
                assert await used.get_attribute("data-ratio") == "0.75"
                await shows(page, "ratio", "0.75")
                engine.cost_table = cost_table("stale")
                await shows(page, "table_state", "stale")
                engine.cost_table = replace(cost_table("flat"), plain_ms=None)
                await shows(page, "table_state", "flat")
                assert await page.text_content("#cost_table tr[data-batch='8'] td") == "\N{EN DASH}"

    run(scenario)


def test_a_policy_without_drafts_shows_no_ratio_and_no_blocks() -> None:
    async def scenario() -> None:
        engine = scripted_engine("plain", max_len=1024, delay_s=0.005)
        engine.cost_table = cost_table()
        async with serving_watched(engine) as (_, client, url), browsing(url) as page:
            await shows(page, "table_state", "measured")
            async with streaming(client, 1, 900):
                used = await page.wait_for_selector("#cost_table tr[data-batch='1'] td.used")
                assert await used.get_attribute("data-ratio") == "plain"
                for name in ("ratio", "accepted_mean", "keep_share"):
                    assert await page.text_content(f"#{name}") == "\N{EN DASH}"
                strips = await page.evaluate(READ_STRIPS, 7)
                blocks = {block for step in strips["stream-0"]["steps"] for block in step}
                assert not {"accepted", "rejected", "pruned"} & blocks

    run(scenario)


@pytest.mark.parametrize(("width", "height", "scheme"), [(1280, 800, "light"), (390, 844, "dark")])
def test_page_fits_its_screen_in_the_scheme_that_the_viewer_prefers(width: int, height: int, scheme: str) -> None:
    async def scenario() -> None:
        engine = scripted_engine(max_batch=16, max_len=1024, delay_s=0.01)
        engine.cost_table = cost_table()
        async with (
            serving_watched(engine) as (_, client, url),
            browsing(url, width=width, height=height, scheme=scheme) as page,
            streaming(client, 16, 900),
        ):
            await page.wait_for_function("() => document.querySelectorAll('.strip').length === 16")
            assert await page.evaluate("document.scrollingElement.scrollWidth") <= width
            if width > 1000:  # all of it at one look
                assert await page.evaluate("document.scrollingElement.scrollHeight") <= height
            background = await page.evaluate("getComputedStyle(document.documentElement).backgroundColor")
            lightness = sum(int(part) for part in background.strip("rgb()").split(",")) / 3
            assert lightness > 200 if scheme == "light" else lightness < 50

    run(scenario)
