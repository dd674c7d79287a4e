"""Admission control: limits on answers and on work beside the event loop, shared fairly among tenants."""

from kvmosaic.server.admission.limits import Admission
from kvmosaic.server.admission.request_threads import NUM_THREADS, FairThreads, RequestThreads

__all__ = ["NUM_THREADS", "Admission", "FairThreads", "RequestThreads"]
