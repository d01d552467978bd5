/* What the share daemon of a node and the interposition library in its tenants say to each other.
 *
 * Two files of shared memory for each tenant (one replica on one device): the grant, which only the daemon writes (a
 * tenant can map it for reading and no more), and the usage, which the tenant's processes write. One question and one
 * answer over a unix socket (SOCK_SEQPACKET) bring a process the descriptors of both; after that nothing leaves the
 * process. All integers are little-endian as the machine has them; times are CLOCK_MONOTONIC, in nanoseconds; device
 * time is time of the whole device, in nanoseconds. src/springtide/backends/sharing/gpu/segments.py is the daemon's side, and a
 * test compares the two field by field.
 */
#ifndef SPRINGTIDE_SHARE_H
#define SPRINGTIDE_SHARE_H

#include <stdatomic.h>
#include <stdint.h>

#define ST_MAGIC 0x53545348u
#define ST_LAYOUT 1u
#define ST_SOCKET_VARIABLE "SPRINGTIDE_GPU_SOCKET"
#define ST_UUID_BYTES 16
#define ST_TENANT_BYTES 64
#define ST_NUM_PROCESSES 64
#define ST_NUM_CYCLES 16
#define ST_SEGMENT_BYTES 8192

/* Flags of a grant. */
#define ST_UNLIMITED 1u /* nobody has to be spared: launches are counted, none waits */
#define ST_CLOSED 2u    /* these files are given up: ask the daemon again before the next launch */

/* The grant. A launch may begin while used_ns, as it was before the launch, is below granted_ns. The daemon raises
 * granted_ns at every turn by the granted rate, never above used_ns plus a burst, so that nobody saves up. */
struct st_grant {
    uint32_t magic;
    uint32_t layout;
    uint64_t segment_id; /* drawn; the usage of the same tenant has the same */
    uint8_t device_uuid[ST_UUID_BYTES];
    char tenant[ST_TENANT_BYTES]; /* for messages, ends with 0 */
    _Atomic uint64_t memory_limit_bytes; /* 0: none */
    uint64_t stale_after_ns;     /* a heartbeat older than this: the daemon is gone and nobody is held */
    uint64_t max_wait_ns;        /* no launch waits longer, whatever happens */
    uint64_t unused_0;
    _Atomic uint64_t heartbeat_ns; /* offset 128: the daemon's last turn */
    _Atomic uint64_t granted_ns;   /* device time that may have been launched since the tenant began; never falls */
    _Atomic uint32_t wake;         /* futex word, raised and woken whenever somebody waits and something changed */
    _Atomic uint32_t flags;
    _Atomic uint64_t rate_ppm; /* what is granted now, in millionths of the device; for people */
};

/* One process of a tenant. The daemon writes pid and start_ticks when it answers the process, and clears the whole slot
 * when the process is dead: whatever it held counts no longer. */
struct st_process {
    _Atomic uint32_t pid; /* 0: free. In the daemon's own numbering of processes. */
    _Atomic uint32_t num_waiting; /* threads that are held back at this moment */
    _Atomic uint64_t start_ticks;
    _Atomic uint64_t memory_bytes;
    _Atomic uint64_t num_launches;
    uint64_t unused[4];
};

/* The usage. Whatever is in it, the daemon survives it: a tenant can hurt nobody but itself with it. */
struct st_usage {
    uint32_t magic;
    uint32_t layout;
    uint64_t segment_id;
    uint64_t unused_0[6];
    _Atomic uint64_t used_ns; /* offset 64: device time launched since the tenant began */
    _Atomic uint64_t throttled_ns; /* time that threads were held back, added up */
    _Atomic uint64_t num_open;     /* launches let through because the daemon was gone or max_wait_ns was over */
    _Atomic uint64_t num_denied;   /* allocations refused because of the memory limit */
    _Atomic uint64_t measured_ns;  /* device time of the launches that were measured by events ... */
    _Atomic uint64_t estimated_ns; /* ... and what these had been counted as */
    /* Who of the tenant's processes adds up its memory right now: its slot + 1, 0: nobody. A hint that keeps two that
     * allocate at once from both being refused; a wrong one costs microseconds and never exactness. */
    _Atomic uint64_t memory_turn;
    uint64_t unused_1[17];
    struct st_process processes[ST_NUM_PROCESSES]; /* offset 256 */
    /* Launch cycles: from the first launch after a synchronisation to the end of the next one. Only a few threads write
     * here, each whole cycle at once; a torn reading costs the daemon one wrong measurement. Offset 4352. */
    _Atomic uint64_t num_cycles_begun;
    _Atomic uint64_t num_cycles_ended;
    _Atomic uint64_t cycle_started_ns; /* 0: none runs */
    uint64_t unused_2[5];
    _Atomic uint64_t cycle_ns[ST_NUM_CYCLES]; /* the newest cycles, cycle number k at k % ST_NUM_CYCLES */
};

/* What a process asks, once for each device it uses. Anything else on the socket is answered by closing it. */
struct st_hello {
    uint32_t magic;
    uint32_t layout;
    uint8_t device_uuid[ST_UUID_BYTES];
};

/* Status of an answer. */
#define ST_OK 0u      /* two descriptors come with it: the grant, open for reading only, and the usage */
#define ST_UNKNOWN 1u /* nobody has given this process a share of this device: it is not held; ask again later */
#define ST_FULL 2u    /* the tenant has more processes than there are slots: this one is not held */
#define ST_BAD 3u     /* the question made no sense, or is of another layout */

struct st_welcome {
    uint32_t magic;
    uint32_t layout;
    uint32_t status;
    uint32_t process_slot;
    uint64_t segment_id;
    uint32_t retry_ms; /* where it is not ST_OK: ask again no sooner */
    uint32_t unused_0;
};

_Static_assert(sizeof(struct st_grant) == 160, "the grant's layout");
_Static_assert(sizeof(struct st_process) == 64, "a process's layout");
_Static_assert(sizeof(struct st_usage) == 4544, "the usage's layout");
_Static_assert(sizeof(struct st_hello) == 24, "the question's layout");
_Static_assert(sizeof(struct st_welcome) == 32, "the answer's layout");

#endif
