/* Asking the daemon: what gate.c, client.c and device.c share among themselves. */
#ifndef SPRINGTIDE_CLIENT_H
#define SPRINGTIDE_CLIENT_H

#include "hooks.h"

/* Whether this process has the address of a daemon at all. A load and a branch once it is known. */
bool st_client_has_daemon(void);
/* As st_ask_daemon, but gives up after `patience_ns`. Where it returns NULL, `*is_no` tells a daemon that holds nobody
 * here from one that did not answer. */
struct st_bucket *st_ask_daemon_within(const uint8_t uuid[ST_UUID_BYTES], uint64_t patience_ns, uint32_t *retry_ms,
                                       bool *is_no);
/* In the child of a fork. */
void st_gate_forked(void);
/* Nobody uses these files any longer, as far as this process is concerned: its pages give way to empty ones, which look
 * like a daemon that is gone, so that a thread that still holds the bucket harms nobody and is not held. */
void st_retire_bucket(struct st_bucket *bucket);

/* A lock that is never held for longer than one question takes, never waited for longer than that, and that a child of
 * a fork can simply set free. */
struct st_lock {
    _Atomic uint32_t word; /* 0 free, 1 held, 2 held and somebody waits */
};
bool st_lock_try(struct st_lock *lock);
/* Returns whether it was taken before `patience_ns` were over. */
bool st_lock_within(struct st_lock *lock, uint64_t patience_ns);
void st_lock_free(struct st_lock *lock);

#endif
