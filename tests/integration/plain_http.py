"""HTTP requests to test servers, without TLS.

By default, httpx loads all certificates for each request, which takes 50 ms of CPU time.
"""

from __future__ import annotations

import functools
import ssl

import httpx

_options = {"trust_env": False, "timeout": 60, "verify": ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)}
request = functools.partial(httpx.request, **_options)
get = functools.partial(httpx.get, **_options)
post = functools.partial(httpx.post, **_options)
stream = functools.partial(httpx.stream, **_options)
