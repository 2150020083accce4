"""Records of a run's training episodes.

Read them with `crl.records.reader.read_episodes`, or on the command line with `crl episodes`.
"""
