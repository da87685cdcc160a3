"""API keys, as plain ASGI middleware (streams and disconnects pass through untouched)."""

from __future__ import annotations

import hmac

from sgling.srt.entrypoints.errors import json_response

_OPEN_PREFIXES = ("/health", "/ready", "/metrics")
ADMIN_PATHS = ("/flush_cache", "/abort_request", "/start_profile", "/stop_profile")


class ApiKeyMiddleware:
    """Refuses requests without the right bearer token: 401.

    ``admin_api_key`` guards the admin routes; without one they want ``api_key`` like all others.
    """

    def __init__(self, app, api_key: str | None, admin_api_key: str | None):
        self._app = app
        self._api_key = api_key
        self._admin_api_key = admin_api_key

    async def __call__(self, scope, receive, send) -> None:
        """Pass a request on or refuse it."""
        if scope["type"] == "http" and not self._allowed(scope):
            await json_response({"error": "Unauthorized"}, 401)(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _allowed(self, scope) -> bool:
        path = scope["path"]
        if scope["method"] == "OPTIONS" or path == "/" or path.startswith(_OPEN_PREFIXES):
            return True
        is_admin = path.rstrip("/") in ADMIN_PATHS
        wanted = self._admin_api_key if is_admin and self._admin_api_key is not None else self._api_key
        if wanted is None:
            return True
        given = dict(scope["headers"]).get(b"authorization", b"")
        return hmac.compare_digest(given, b"Bearer " + wanted.encode())
