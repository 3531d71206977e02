"""Opens web addresses: time-outs, retries, proxies and credentials in one place. Knows no file."""

from __future__ import annotations

import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from urllib.parse import unquote, urlsplit, urlunsplit

import urllib3

from headrace.errors import DownloadError

TIMEOUT = urllib3.Timeout(connect=20, read=60)
RETRIES = urllib3.Retry(
    total=4, backoff_factor=0.5, status_forcelist=(429, 500, 502, 503, 504), raise_on_status=False
)


@contextmanager
def opened(url: str, headers: Mapping[str, str]) -> Iterator[urllib3.BaseHTTPResponse]:
    """The answer to a GET, its body unread. Raises DownloadError, also for what breaks in the block."""
    try:
        if urlsplit(url).scheme not in ("https", "http"):
            raise ValueError("is no web address")
        plain, own = _split_credentials(url)
        with _pool(plain) as pool:
            response = pool.request("GET", plain, headers={**own, **headers}, preload_content=False)
            try:
                yield response
            finally:
                response.close()
    except (urllib3.exceptions.HTTPError, ValueError) as error:
        raise DownloadError(f"{shown(url)}: {_cause(error)}") from None


def shown(url: str) -> str:
    """A URL for people: without credentials, query and fragment, and not too long."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return "an address that is none"  # it could hold credentials anywhere
    host = parts.netloc.rpartition("@")[2]
    return urlunsplit((parts.scheme, host, parts.path, "", ""))[:200]


def get_document(url: str, accept: str, max_bytes: int) -> bytes:
    """A small document. Raises DownloadError."""
    with opened(url, {"Accept": accept}) as response:
        if response.status != 200:
            raise DownloadError(f"{shown(url)}: the server answered {response.status}")
        body = response.read(max_bytes + 1)
    if len(body) > max_bytes:
        raise DownloadError(f"{shown(url)}: is longer than {max_bytes:,} bytes")
    return body


def _pool(url: str) -> urllib3.PoolManager:
    """Through the proxy that the system names for this host, if it names one."""
    parts = urlsplit(url)
    proxy = urllib.request.getproxies().get(parts.scheme)
    if not proxy or urllib.request.proxy_bypass(parts.netloc):
        return urllib3.PoolManager(retries=RETRIES, timeout=TIMEOUT)
    address, own = _split_credentials(proxy if "://" in proxy else f"http://{proxy}")
    credentials = {f"proxy-{k}": v for k, v in own.items()}
    return urllib3.ProxyManager(
        address, proxy_headers=credentials, retries=RETRIES, timeout=TIMEOUT
    )


def _split_credentials(url: str) -> tuple[str, dict[str, str]]:
    """A URL without its `user:password@`, and the header that says them."""
    parts = urlsplit(url)
    user, _, host = parts.netloc.rpartition("@")
    if not user:
        return url, {}
    headers = urllib3.util.make_headers(basic_auth=unquote(user))
    return urlunsplit(parts._replace(netloc=host)), headers


def _cause(error: Exception) -> str:
    reason = getattr(error, "reason", None) or error
    return " ".join(str(reason).split()) or type(error).__name__
