"""Answer HTTP requests with an adaptive model, and show it on a page.

    from adaptivit.serve import Service, make_app

    app = make_app(Service(adaptivit.load("runs/aht/model")))   # any ASGI server runs it

Needs the extra `serve`. See docs/serve.md.
"""

from .app import make_app
from .batcher import Batcher, Job
from .command import demo_model, run
from .service import Service

__all__ = ["Batcher", "Job", "Service", "demo_model", "make_app", "run"]
