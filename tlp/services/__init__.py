"""The services of `tlp up` (MLflow, Prefect and a Prefect worker, all on this machine), `tlp status` and `tlp doctor`.

Nothing here imports MLflow or Prefect: those only run as processes.
"""

from tlp.services.contract import ServicesView
from tlp.services.prefect import CODE_LABEL, POOL, STORE_VARIABLE, client_env, prefect_env
from tlp.services.table import look, prefect_apis
from tlp.services.updown import down, temporary_services, up
