"""Secure aggregation: sums of updates that the server learns, of sites whose single updates it does not.

The protocol is SA-1, double masking after Bonawitz et al. 2017 (ACM CCS, "Practical Secure Aggregation for
Privacy-Preserving Machine Learning"), over the complete graph or, after Bell et al. 2020 (arXiv 2020/704, "Secure
Single-Server Aggregation with (Poly)Logarithmic Overhead"), over a random Harary graph.
"""
