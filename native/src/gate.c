/* The token bucket in shared memory: who may launch now, who waits, and for how long at most.
 *
 * A launch adds what it costs to used_ns and may go if what was there before is below granted_ns. All else is in here:
 * waiting, and finding out that nobody grants anything any longer. The bounds: where the daemon is dead or stands
 * still, a launch is held until the heartbeat is stale and LOOK_NS longer at most; where it lives, for max_wait_ns at
 * most. Nothing in here waits for anything else.
 */
#include "client.h"

#include <errno.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define LOOK_NS 20000000ull            /* a thread that waits looks around at least this often */
#define FIRST_PATIENCE_NS 110000000ull /* for the first question of all: as long as the bound that is stated allows */
#define AGAIN_PATIENCE_NS 15000000ull  /* for later ones: a daemon that stands still must not cost much */
#define MAX_STALE_NS 5000000000ull
#define MAX_WAIT_NS 10000000000ull
#define LAUNCHES_PER_LOOK 16u /* without a bucket: the clock is read once in so many launches of a thread */

/* Launches of this thread since it last looked whether there is a daemon now. */
static __thread __attribute__((tls_model("initial-exec"))) uint32_t num_blind;

static struct st_lock asking; /* one thread at a time asks for buckets and replaces them */

/* Whatever the daemon wrote there, nobody is held for ever. */
static uint64_t stale_after_ns(const struct st_grant *grant) {
    return grant->stale_after_ns < MAX_STALE_NS ? grant->stale_after_ns : MAX_STALE_NS;
}

static uint64_t max_wait_ns(const struct st_grant *grant) {
    return grant->max_wait_ns < MAX_WAIT_NS ? grant->max_wait_ns : MAX_WAIT_NS;
}

static bool is_stale(const struct st_grant *grant, uint64_t now_ns) {
    uint64_t heartbeat_ns = atomic_load_explicit(&grant->heartbeat_ns, memory_order_relaxed);
    uint64_t age_ns = now_ns > heartbeat_ns ? now_ns - heartbeat_ns : heartbeat_ns - now_ns;
    /* A heartbeat of another clock (a time namespace of its own) lies in the future: nobody can be held by that. */
    return age_ns > stale_after_ns(grant);
}

static bool has_flag(const struct st_grant *grant, uint32_t flag) {
    return (atomic_load_explicit(&grant->flags, memory_order_relaxed) & flag) != 0;
}

/* --- finding the daemon -------------------------------------------------------------------------------------------- */

static void replace(struct st_device *device, struct st_bucket *old, struct st_bucket *fresh) {
    if (old == fresh) {
        return;
    }
    atomic_store_explicit(&device->bucket, fresh, memory_order_release);
    if (fresh != NULL) {
        st_memory_attached(device, fresh); /* what was allocated before this bucket came counts in it, too */
    }
    if (old != NULL) {
        st_retire_bucket(old);
    }
}

static void ask_now(struct st_device *device, uint64_t patience_ns) {
    struct st_bucket *old = atomic_load_explicit(&device->bucket, memory_order_acquire);
    uint32_t retry_ms = 0;
    bool is_no = false;
    struct st_bucket *fresh = st_ask_daemon_within(device->uuid, patience_ns, &retry_ms, &is_no);
    /* A daemon that has just come back may not know us yet, and takes the files up again when it does. */
    if (fresh != NULL || (is_no && old != NULL && has_flag(old->grant, ST_CLOSED))) {
        replace(device, old, fresh);
    }
    atomic_store(&device->ask_again_ns, st_now_ns() + (uint64_t)retry_ms * 1000000ull);
}

/* Asks the daemon if it is time to. Whoever comes while another thread asks goes on with what there is, unless nobody
 * has asked ever: then all wait, so that a program's first launches are not made beside its bucket. */
static struct st_bucket *bucket_now(struct st_device *device, uint64_t now_ns, uint64_t patience_ns) {
    uint64_t ask_again_ns = atomic_load_explicit(&device->ask_again_ns, memory_order_acquire);
    if (now_ns < ask_again_ns || !st_client_has_daemon()) {
        return atomic_load_explicit(&device->bucket, memory_order_acquire);
    }
    int error = errno;
    bool is_first = ask_again_ns == 0;
    if (is_first ? st_lock_within(&asking, FIRST_PATIENCE_NS) : st_lock_try(&asking)) {
        uint64_t held_ns = st_now_ns() - now_ns;
        if (now_ns + held_ns >= atomic_load(&device->ask_again_ns)) {
            bool has_time = is_first && held_ns + patience_ns < FIRST_PATIENCE_NS;
            ask_now(device, has_time ? FIRST_PATIENCE_NS - held_ns : patience_ns);
        }
        st_lock_free(&asking);
    }
    errno = error;
    return atomic_load_explicit(&device->bucket, memory_order_acquire);
}

/* The bucket, or what has come in its place where its files are given up or nobody looks after them. */
static struct st_bucket *look_after(struct st_device *device, struct st_bucket *bucket, uint64_t now_ns) {
    if (bucket != NULL && !has_flag(bucket->grant, ST_CLOSED) && !is_stale(bucket->grant, now_ns)) {
        return bucket;
    }
    return bucket_now(device, now_ns, AGAIN_PATIENCE_NS);
}

struct st_bucket *st_bucket_of(struct st_device *device) {
    if (!st_client_has_daemon()) {
        return NULL;
    }
    return look_after(device, atomic_load_explicit(&device->bucket, memory_order_acquire), st_now_ns());
}

void st_gate_forked(void) {
    atomic_store(&asking.word, 0);
}

/* --- waiting ------------------------------------------------------------------------------------------------------- */

/* What this launch was charged is granted. Where launches before it were given back, all that is charged by now may
 * be granted although the value it began with never will be. */
static bool is_granted(const struct st_bucket *bucket, uint64_t used_before_ns) {
    uint64_t granted_ns = atomic_load_explicit(&bucket->grant->granted_ns, memory_order_acquire);
    return used_before_ns < granted_ns ||
           atomic_load_explicit(&bucket->usage->used_ns, memory_order_relaxed) < granted_ns;
}

/* Sleeps until the daemon wakes us, at most until `until_ns`. */
static void sleep_on(const struct st_grant *grant, uint32_t seen, uint64_t now_ns, uint64_t until_ns) {
    uint64_t nap_ns = until_ns > now_ns ? until_ns - now_ns : 0;
    nap_ns = nap_ns < LOOK_NS ? nap_ns : LOOK_NS;
    struct timespec timeout = {0, (long)nap_ns};
    /* Not private: who wakes us is another process. The word can only be read, which is enough for waiting. */
    if (syscall(SYS_futex, &grant->wake, FUTEX_WAIT, seen, &timeout, NULL, 0) != 0 && errno != EAGAIN &&
        errno != EINTR && errno != ETIMEDOUT) {
        struct timespec pause = {0, 1000000}; /* a kernel without such futexes: look again in a millisecond */
        nanosleep(&pause, NULL);
    }
}

/* When something ends without the daemon's doing: the trust in its heartbeat, or the patience with it. */
static uint64_t look_again_ns(const struct st_grant *grant, uint64_t began_ns) {
    uint64_t stale_ns = atomic_load_explicit(&grant->heartbeat_ns, memory_order_relaxed) + stale_after_ns(grant) + 1;
    uint64_t over_ns = began_ns + max_wait_ns(grant);
    return stale_ns < over_ns ? stale_ns : over_ns;
}

/* Waits for the tokens of a launch that is charged already; `*now_ns` goes along. Returns whether they came; false is a
 * launch that goes without. */
static bool wait_for_tokens(struct st_bucket *bucket, uint64_t used_before_ns, uint64_t *now_ns) {
    const struct st_grant *grant = bucket->grant;
    uint64_t began_ns = *now_ns;
    bool may_go = false;
    bool is_over = false;
    atomic_fetch_add(&bucket->process->num_waiting, 1);
    while (!may_go && !is_over) {
        /* The word before the tokens: what changes in between ends the sleep at once. */
        uint32_t seen = atomic_load(&grant->wake);
        may_go = is_granted(bucket, used_before_ns) || has_flag(grant, ST_UNLIMITED);
        is_over = *now_ns - began_ns >= max_wait_ns(grant) || has_flag(grant, ST_CLOSED) || is_stale(grant, *now_ns);
        if (!may_go && !is_over) {
            sleep_on(grant, seen, *now_ns, look_again_ns(grant, began_ns));
            uint64_t woken_ns = st_now_ns();
            atomic_fetch_add_explicit(&bucket->usage->throttled_ns, woken_ns - *now_ns, memory_order_relaxed);
            *now_ns = woken_ns;
        }
    }
    atomic_fetch_sub(&bucket->process->num_waiting, 1);
    return may_go;
}

/* A launch that is charged and finds no tokens. Returns what time it is then. */
static uint64_t hold(struct st_bucket *bucket, uint64_t used_before_ns, uint64_t now_ns) {
    if (is_stale(bucket->grant, now_ns) || !wait_for_tokens(bucket, used_before_ns, &now_ns)) {
        atomic_fetch_add_explicit(&bucket->usage->num_open, 1, memory_order_relaxed);
    }
    return now_ns;
}

struct st_bucket *st_gate_slowly(struct st_device *device, struct st_bucket *bucket, uint64_t used_before_ns) {
    if (!st_client_has_daemon()) {
        return bucket;
    }
    if (bucket == NULL) {
        /* Nobody holds this process. Somebody may later, but looking at the clock has to be worth it. */
        bool is_first = atomic_load_explicit(&device->ask_again_ns, memory_order_relaxed) == 0;
        if (!is_first && ++num_blind < LAUNCHES_PER_LOOK) {
            return NULL;
        }
        num_blind = 0;
        return bucket_now(device, st_now_ns(), AGAIN_PATIENCE_NS);
    }
    /* Where nobody has to be spared a program runs ahead of its tokens all the time: that must not cost a look at the
     * clock for each launch. */
    if (has_flag(bucket->grant, ST_UNLIMITED) &&
        (atomic_load_explicit(&bucket->process->num_launches, memory_order_relaxed) & 63) != 0) {
        return bucket;
    }
    int error = errno;
    uint64_t now_ns = st_now_ns();
    uint64_t went_ns = now_ns;
    if (!is_granted(bucket, used_before_ns) && !has_flag(bucket->grant, ST_UNLIMITED)) {
        went_ns = hold(bucket, used_before_ns, now_ns);
    }
    /* Where these files are given up the next launch finds new ones. Who has just waited for tokens does not wait for an
     * answer as well. */
    if (went_ns - now_ns < LOOK_NS) {
        look_after(device, bucket, went_ns);
    }
    errno = error;
    return bucket;
}

void st_gate_refund(struct st_bucket *bucket, uint64_t cost_ns) {
    if (bucket != NULL) {
        atomic_fetch_sub_explicit(&bucket->usage->used_ns, cost_ns, memory_order_relaxed);
        atomic_fetch_sub_explicit(&bucket->process->num_launches, 1, memory_order_relaxed);
    }
}
