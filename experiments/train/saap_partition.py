"""The partition of the pocket model's keys that the package ships"""
from sparse_nb import saap_partition as library


def saap_partition(recorder):
    "Train it and write its file."
    library.record(recorder.out, quick=recorder.quick, say=recorder.say)
