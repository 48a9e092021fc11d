"""What both ends of a connection share: identity, enrolment, member list, hello, grants, transfers, outbox."""
