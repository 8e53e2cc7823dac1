"""The parameters of adapters that the Tinker cookbook publishes, against those that our own tests ask for."""

import json
import subprocess

from tests.models.published import REFUSED, SERVED, UNKNOWN
from tests.recipes.workshop import PYTHON

PRINT = (
    "import json; from tinker_cookbook import hyperparam_utils as h; "
    "print(json.dumps(h._LORA_PARAMS_PER_RANK_BY_COMPONENT))"
)


def test_every_model_that_the_cookbook_counts_is_served_as_it_counts_or_known_not_to_be() -> None:
    done = subprocess.run([str(PYTHON), "-c", PRINT], capture_output=True, text=True, check=True, timeout=600)
    published = json.loads(done.stdout)
    assert {name: published[name] for name in SERVED} == {name: model.counts for name, model in SERVED.items()}
    others = published.keys() - SERVED.keys() - REFUSED.keys()
    assert not [name for name in others if not name.startswith(UNKNOWN)]
    assert REFUSED.keys() < published.keys()
