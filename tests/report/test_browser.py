"""Reports in a real browser: no complaint, no request, sorting, no overflow, in light, in dark and on paper."""

import threading

import pytest
from browser import Browser, chromium
from finished_runs import fitted

from hotlap.report import report_of, write_report
from hotlap.report.document import Chart
from hotlap.report.serving import Server

pytestmark = pytest.mark.skipif(chromium() is None, reason="no Chromium is installed; Debian's package is `chromium`")
KINDS = ("fit", "trees", "search", "temporal", "script")
OVERFLOW = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
CONTRAST = """
(() => {
  const light = (css) => {
    const [r, g, b] = css.match(/[\\d.]+/g).slice(0, 3).map((one) => {
      const part = Number(one) / 255;
      return part <= 0.03928 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
    });
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ground = (node) => {
    for (let one = node; one; one = one.parentElement) {
      const found = getComputedStyle(one).backgroundColor;
      if (!found.startsWith("rgba(0, 0, 0, 0)")) return found;
    }
    return "rgb(255, 255, 255)";
  };
  const nodes = [...document.querySelectorAll("h1, h2, h3, p, dt, dd, td, th button, a, summary, figcaption, .found")];
  const ratios = nodes.filter((node) => node.getClientRects().length).map((node) => {
    const [a, b] = [light(getComputedStyle(node).color), light(ground(node))];
    return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
  });
  return Math.min(...ratios);
})()
"""
"""The least contrast of words with what is behind them."""


@pytest.fixture(scope="module")
def browser():
    made = Browser()
    yield made
    made.close()


def opened(browser, path, **how):
    return browser.page(path.resolve().as_uri(), **how)


@pytest.mark.parametrize("kind", KINDS)
def test_it_opens_without_a_complaint_or_a_request_and_with_every_mark(browser, runs, kind):
    path, report = write_report(runs / kind), report_of(runs / kind)
    page = opened(browser, path)
    assert page.complaints == []
    assert page.requests == [path.resolve().as_uri()]
    charts = [block for part in report.sections for block in part.blocks if isinstance(block, Chart)]
    marks = sum("".join(chart.picture.parts).count('class="mark ') for chart in charts)
    assert page.run("document.querySelectorAll('svg .mark').length") == marks
    assert page.run("document.querySelectorAll('figure svg').length") == len(charts)
    assert page.run("document.querySelectorAll('section').length") == len(report.sections)
    outside = """[...document.querySelectorAll("figure svg")].filter((svg) => {
      const box = svg.getBoundingClientRect();
      return [...svg.querySelectorAll(".mark, .line, rect, text")].some((one) => {
        const inner = one.getBoundingClientRect();
        return inner.left < box.left - 2 || inner.right > box.right + 2;
      });
    }).map((svg) => svg.getAttribute("aria-label"))"""
    assert page.run(outside) == []
    page.close()


@pytest.mark.parametrize("width", [320, 360, 768, 1200, 2000])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_nothing_runs_over_the_edge_at_any_width(browser, runs, width, dark):
    for kind in KINDS:
        page = opened(browser, write_report(runs / kind), width=width, dark=dark)
        page.run("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
        assert page.run(OVERFLOW) <= 0, kind
        page.close()


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_words_stand_out_from_what_is_behind_them(browser, runs, dark):
    for kind in ("fit", "temporal"):
        page = opened(browser, write_report(runs / kind), dark=dark)
        assert page.run(CONTRAST) >= 4.5
        page.close()


def test_dark_is_dark_and_light_is_light(browser, runs):
    path = write_report(runs / "fit")
    grounds = []
    for dark in (False, True):
        page = opened(browser, path, dark=dark)
        grounds.append(page.run("getComputedStyle(document.body).backgroundColor"))
        grounds.append(page.run("getComputedStyle(document.querySelector('.c0')).stroke"))
        page.close()
    assert grounds == ["rgb(246, 247, 249)", "rgb(0, 114, 178)", "rgb(13, 17, 23)", "rgb(86, 180, 233)"]


def test_on_paper_there_is_no_navigation_and_nothing_runs_over(browser, runs):
    page = opened(browser, write_report(runs / "fit"), width=760, media="print")
    assert page.run("getComputedStyle(document.querySelector('nav')).display") == "none"
    assert page.run(OVERFLOW) <= 0
    page.close()


SORTED = "[...document.querySelector('table[data-sorts]').tBodies[0].rows].map((row) => row.cells[{at}].textContent)"


def test_a_table_sorts_by_numbers_and_by_words_with_the_mouse_and_the_keyboard(browser, runs):
    page = opened(browser, write_report(runs / "search"))
    page.run("document.querySelector('figure details').open = true")
    scores = "[...document.querySelector('table').tBodies[0].rows].map((row) => row.cells[2].dataset.n)"
    click = "document.querySelector('table').tHead.rows[0].cells[2].querySelector('button').click()"
    page.run(click)
    rising = [float(one) for one in page.run(scores) if one is not None]
    assert rising == sorted(rising)
    assert len(set(rising)) > 1
    assert page.run("document.querySelector('table').tHead.rows[0].cells[2].getAttribute('aria-sort')") == "ascending"
    page.run(click)
    assert [float(one) for one in page.run(scores) if one is not None] == rising[::-1]
    page.run("document.querySelector('table').tHead.rows[0].cells[1].querySelector('button').focus()")
    page.key("Enter", 13)
    states = page.run(SORTED.replace("{at}", "1"))
    assert states == sorted(states)
    assert page.run("document.querySelectorAll('th[aria-sort]').length") == 1
    page.close()


def test_everything_that_can_be_used_can_be_reached_with_the_keyboard(browser, runs):
    page = opened(browser, write_report(runs / "fit"))
    reached = []
    for _ in range(200):
        page.key("Tab", 9)
        place = page.run("document.activeElement === document.body ? '' : document.activeElement.tagName")
        if not place:
            break
        reached.append(place)
    else:
        pytest.fail("the keyboard does not come to the end of the page")
    assert {"A", "SUMMARY", "BUTTON"} <= set(reached)
    assert reached.count("SUMMARY") == page.run("document.querySelectorAll('summary').length")
    page.close()


@pytest.mark.parametrize("name", ["<script>alert(1)<∕script>", "<img src=x onerror=alert(1)>", "\"quoted\" 'name'"])
def test_a_run_named_as_markup_runs_nothing(browser, tmp_path, name):
    run = fitted(tmp_path / name, epochs=2)
    page = opened(browser, run.report())
    assert page.complaints == []
    assert len(page.requests) == 1
    assert page.run("document.querySelector('.kind b').textContent") == name
    assert page.run("document.scripts.length") == 1
    assert page.run("document.images.length") == 0
    page.close()


def test_the_policy_of_a_page_stops_scripts_and_requests_that_came_in_all_the_same(browser, runs, tmp_path):
    text = write_report(runs / "fit").read_text(encoding="utf-8")
    planted = (
        "<script>document.title='planted'</script><img src='http://127.0.0.1:9/x' onerror=\"document.title='planted'\">"
    )
    (tmp_path / "page.html").write_text(text.replace("</main>", f"{planted}</main>"), encoding="utf-8")
    page = opened(browser, tmp_path / "page.html")
    assert page.run("document.title") == "fit · hotlap"
    assert any("Content Security Policy" in str(one) for one in page.complaints)
    page.close()


def test_the_served_index_opens_sorts_and_leads_to_every_run(browser, runs):
    server = Server(runs, port=0)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        page = browser.page(server.address, width=360)
        assert page.complaints == []
        assert page.requests == [server.address]
        assert page.run(OVERFLOW) <= 0
        links = page.run("[...document.querySelectorAll('td a')].map((one) => one.href)")
        assert len(links) == len(KINDS)
        page.run("document.querySelector('th button').click()")
        names = page.run(SORTED.replace("{at}", "0"))
        assert names == sorted(names)
        page.close()
        for link in links:
            page = browser.page(link)
            assert page.complaints == []
            assert page.requests == [link]
            assert page.run("document.querySelector('.home a').getAttribute('href')") == "/"
            page.close()
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
