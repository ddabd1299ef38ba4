"""A process that serves clients and has neither the router nor a worker: `--role=front`."""

from __future__ import annotations

import secrets
from dataclasses import dataclass

from jdisagg.core.settings import Settings
from jdisagg.model.checkpoint import read_defaults
from jdisagg.model.tokenizer import Tokenizer
from jdisagg.policy.front import Front
from jdisagg.serve.cluster.certificates import channel_credentials
from jdisagg.serve.cluster.control_client import ControlClient
from jdisagg.serve.cluster.fronts import FrontNode
from jdisagg.serve.cluster.periodic import PeriodicTask
from jdisagg.serve.cluster.processes import heartbeat_of, identity_of, locate_of, read_secret
from jdisagg.serve.deploy.deployment import Deployment
from jdisagg.serve.driver.local_service import LocalService
from jdisagg.serve.observability.metrics import Metrics

REPORT_S = 1.0


@dataclass(frozen=True)
class FrontProcess:
    """The service that clients see, and its link to the router."""

    service: LocalService
    client: ControlClient
    reporter: PeriodicTask

    def start(self) -> None:
        self.service.start()
        self.client.start()
        self.reporter.start()

    def stop(self) -> None:
        self.reporter.stop()
        self.client.stop()
        self.service.stop()


def build_front(deployment: Deployment, settings: Settings) -> FrontProcess:
    """Nothing is joined yet. A router that will never take this process as it is ends the service."""
    credentials, secret = channel_credentials(settings), read_secret(settings)
    tokenizer = Tokenizer(settings.tokenizer or deployment.model_folder)
    node = FrontNode(f"front-{secrets.token_hex(3)}")
    compat = tuple(name for name in settings.metrics_compat.split(",") if name)
    metrics = Metrics(deployment.model_name, compat=compat)
    service = LocalService(
        Front(settings.router_grace_s),
        {},
        {},
        model_name=deployment.model_name,
        model_config=deployment.model,
        fingerprint=deployment.identity.short,
        max_model_len=deployment.max_model_len,
        tokenizer=tokenizer,
        sampling_defaults=read_defaults(deployment.model_folder).sampling,
        observers=(metrics.observe,),
        metrics=metrics,
        remote=node,
        able=lambda: node.able,
    )
    node.driver = service.driver
    identity, heartbeat = identity_of(deployment, settings), heartbeat_of(settings)
    client = ControlClient(
        settings.router,
        secret,
        identity,
        node,
        heartbeat,
        credentials,
        retry_s=heartbeat.interval_s,
        refused=service.end,
        locate=locate_of(settings),
    )
    return FrontProcess(service, client, PeriodicTask(REPORT_S, node.report))
