"""Why does the engine that samples not agree with the model that trains? `trl-gptoss doctor` finds out."""

from .diagnose import Diagnosis, diagnose
from .faults import Fault, faults_of
from .sides import ModelEngine, RecordedEngine, ScoringEngine, VllmServer

__all__ = [
    "Diagnosis",
    "Fault",
    "ModelEngine",
    "RecordedEngine",
    "ScoringEngine",
    "VllmServer",
    "diagnose",
    "faults_of",
]
