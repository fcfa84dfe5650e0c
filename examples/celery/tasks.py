"""Run tasks in a Celery worker, and take the results.

celery --app tasks worker --concurrency 1
python tasks.py 10

Celery connects again by itself, as a worker and as a publisher.
"""

import os
import sys

from celery import Celery

URL = os.environ.get("AMQP_URL", "amqp://guest:guest@localhost/")
app = Celery("tasks", broker=URL, backend="rpc://")
app.conf.update(
    broker_transport_options={"confirm_publish": True},  # a task is on the disk when delay returns
    task_acks_late=True,  # a task whose worker dies is run by another one
    task_reject_on_worker_lost=True,
    worker_prefetch_multiplier=1,
)


@app.task
def add(a, b):
    return a + b


if __name__ == "__main__":
    waiting = [add.delay(number, 1) for number in range(int(sys.argv[1]))]
    print("results", [result.get(timeout=60) for result in waiting])
