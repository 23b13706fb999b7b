"""See what an adaptive model does with images: halting maps, animations, charts, and one HTML report.

    import adaptivit

    adaptivit.visualize.report(model, ["cat.jpg", "photos/"], out="seen")
    seen = adaptivit.visualize.look(model, "cat.jpg")
    adaptivit.visualize.strip(seen, 0).save("cat_blocks.png")

Pictures of single images are PIL images, charts over many are matplotlib figures; animation gives a GIF as bytes.
"""

from .architecture import architecture
from .charts import accuracy, confidence, depths, live, planned, positions, scores
from .charts import importance as importance_chart
from .charts import importances as importance_charts
from .collect import Plans, Scores, Seen, data_set, look
from .importance import Importance, leave_one_out
from .pictures import (
    animation,
    easy_and_hard,
    frames,
    halted,
    maps,
    overlay,
    painted,
    plan_sheet,
    routes,
    strip,
    through,
)
from .report_folder import report, write
from .report_page import ReportData
from .statistics import by_class, gain_and_lose, shallow_and_deep

__all__ = [
    "Importance",
    "Plans",
    "ReportData",
    "Scores",
    "Seen",
    "accuracy",
    "animation",
    "architecture",
    "by_class",
    "confidence",
    "data_set",
    "depths",
    "easy_and_hard",
    "frames",
    "gain_and_lose",
    "halted",
    "importance_chart",
    "importance_charts",
    "leave_one_out",
    "live",
    "look",
    "maps",
    "overlay",
    "painted",
    "plan_sheet",
    "planned",
    "positions",
    "report",
    "routes",
    "scores",
    "shallow_and_deep",
    "strip",
    "through",
    "write",
]
