"""The web console: server-rendered pages at /console, for people who look after an installation.

`door.py` takes every request for /console before the API sees it: a browser logs in with a session, not with a bearer
token, and is answered pages, not JSON. `sessions.py` stores sessions and links; `login.py` and `overview.py` have the
pages; `overview_feed.py` reads their figures once a second for all browsers.
"""
