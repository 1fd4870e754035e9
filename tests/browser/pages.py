"""Opens a page, and listens."""

from pathlib import Path

from playwright.sync_api import Browser, Page


def opened(browser: Browser, path: Path, *, width: int = 1280, dark: bool = False) -> tuple[Page, list[str]]:
    """The page once it is drawn, and all that it logged or asked the network for."""
    page = browser.new_page(
        viewport={"width": width, "height": 850}, color_scheme="dark" if dark else "light"
    )
    noise: list[str] = []
    page.on("console", lambda message: noise.append(f"{message.type}: {message.text}"))
    page.on("pageerror", lambda error: noise.append(f"error: {error}"))
    page.on(
        "request",
        lambda request: None if request.url.startswith(("file:", "data:")) else noise.append(request.url),
    )
    page.set_default_timeout(300_000)  # milliseconds
    page.goto(path.as_uri())
    page.wait_for_function("document.querySelectorAll('.plot .plot-container').length > 0")
    return page, noise
