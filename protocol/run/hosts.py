"""IP addresses of the internet, as opposed to those of one machine or one network. Pure.

What a run's data names, such as a mirror, must be there: a run cannot make its guests ask their own networks.
"""

from __future__ import annotations

import ipaddress
from ipaddress import IPv4Address, IPv6Address

_NAT64 = ipaddress.ip_network("64:ff9b::/96")
"""Carries an IPv4 address in its last 32 bits (RFC 6052)."""


def is_global(host: str) -> bool:
    """Whether `host` is a unicast IP address of the internet. IPv4 addresses within IPv6 ones are looked at, too."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    return all(each.is_global and not each.is_multicast and not each.is_reserved for each in _within(address))


def _within(address: IPv4Address | IPv6Address) -> list[IPv4Address | IPv6Address]:
    """The address, or the IPv4 addresses to which packets for it may go."""
    if isinstance(address, IPv4Address):
        return [address]
    if address in _NAT64:
        return [IPv4Address(int(address) & 0xFFFFFFFF)]
    if address.ipv4_mapped is not None:
        return [address.ipv4_mapped]
    inner = [address.sixtofour] if address.sixtofour is not None else list(address.teredo or ())
    return [address, *inner]
