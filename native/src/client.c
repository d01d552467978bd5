/* Asking the daemon for the two files of this process's share of a device.
 *
 * One question and one answer on a socket of its own, which is closed again: between questions this process holds no
 * descriptor, so that nothing is left behind by a program that closes all of them, and nothing passes on to a child.
 */
#include "client.h"

#include <errno.h>
#include <linux/futex.h>
#include <poll.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#define PATIENCE_NS 50000000ull
#define RETRY_MS 100u          /* nobody answers on the socket: the daemon is about to be started again */
#define UNKNOWN_RETRY_MS 1000u /* the daemon said no, and not when to come again */
#define MAX_RETRY_MS 60000u
#define MAX_UNANSWERED 4u /* a daemon that stands still is asked at last every RETRY_MS << 4 */

/* A bucket, and the memory it lies in: the grant's page first, the usage's behind it. */
struct mapping {
    struct st_bucket bucket; /* first: a bucket is a mapping */
    uint8_t *memory;
    uint64_t segment_id;
    uint32_t slot;
    _Atomic bool is_spare; /* of a parent, before the fork: may be used for other files */
    _Atomic bool is_retired;
    struct mapping *next;
};

static _Atomic(struct mapping *) mappings;
static struct st_lock question; /* one question at a time */
static _Atomic uint32_t num_unanswered;

static struct sockaddr_un address;
static socklen_t address_bytes;
enum { UNREAD = 0, ABSENT = 1, PRESENT = 2 };
static _Atomic int address_state;
static struct st_lock address_lock;

uint64_t st_now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000ull + (uint64_t)now.tv_nsec;
}

/* --- the lock ------------------------------------------------------------------------------------------------------ */

bool st_lock_try(struct st_lock *lock) {
    uint32_t is_free = 0;
    return atomic_compare_exchange_strong(&lock->word, &is_free, 1);
}

bool st_lock_within(struct st_lock *lock, uint64_t patience_ns) {
    if (st_lock_try(lock)) {
        return true;
    }
    uint64_t deadline_ns = st_now_ns() + patience_ns;
    while (atomic_exchange(&lock->word, 2) != 0) {
        uint64_t now_ns = st_now_ns();
        if (now_ns >= deadline_ns) {
            return false;
        }
        uint64_t left_ns = deadline_ns - now_ns;
        struct timespec timeout = {(time_t)(left_ns / 1000000000ull), (long)(left_ns % 1000000000ull)};
        syscall(SYS_futex, &lock->word, FUTEX_WAIT_PRIVATE, 2, &timeout, NULL, 0);
    }
    return true;
}

void st_lock_free(struct st_lock *lock) {
    if (atomic_exchange(&lock->word, 0) == 2) {
        syscall(SYS_futex, &lock->word, FUTEX_WAKE_PRIVATE, 1, NULL, NULL, 0);
    }
}

/* --- the address --------------------------------------------------------------------------------------------------- */

/* The environment is looked at once in the life of a process: programs change it while other threads run. */
static int read_address(void) {
    int state = ABSENT;
    bool is_locked = st_lock_within(&address_lock, PATIENCE_NS);
    if (atomic_load(&address_state) != UNREAD) {
        state = atomic_load(&address_state);
    } else {
        const char *path = getenv(ST_SOCKET_VARIABLE);
        size_t length = path == NULL ? 0 : strlen(path);
        if (length > 0 && length < sizeof address.sun_path) {
            address.sun_family = AF_UNIX;
            memcpy(address.sun_path, path, length + 1);
            address_bytes = (socklen_t)(offsetof(struct sockaddr_un, sun_path) + length + 1);
            state = PRESENT;
        }
        atomic_store(&address_state, state);
    }
    if (is_locked) {
        st_lock_free(&address_lock);
    }
    return state;
}

__attribute__((constructor(102))) static void read_address_early(void) {
    read_address();
}

bool st_client_has_daemon(void) {
    int state = atomic_load_explicit(&address_state, memory_order_acquire);
    return (ST_LIKELY(state != UNREAD) ? state : read_address()) == PRESENT;
}

/* --- one question -------------------------------------------------------------------------------------------------- */

/* Waits until the socket can be read. Interrupted by signals it goes on with the time that is left. */
static bool wait_readable(int descriptor, uint64_t deadline_ns) {
    for (;;) {
        uint64_t now_ns = st_now_ns();
        if (now_ns >= deadline_ns) {
            return false;
        }
        struct pollfd one = {.fd = descriptor, .events = POLLIN};
        int num_ready = poll(&one, 1, (int)((deadline_ns - now_ns + 999999ull) / 1000000ull));
        if (num_ready > 0) {
            return true;
        }
        if (num_ready < 0 && errno != EINTR) {
            return false;
        }
    }
}

/* Takes the descriptors out of a message and returns how many came; those after the second are closed. */
static int take_descriptors(struct msghdr *message, int descriptors[2]) {
    int num_descriptors = 0;
    for (struct cmsghdr *part = CMSG_FIRSTHDR(message); part != NULL; part = CMSG_NXTHDR(message, part)) {
        if (part->cmsg_level != SOL_SOCKET || part->cmsg_type != SCM_RIGHTS) {
            continue;
        }
        size_t count = (part->cmsg_len - CMSG_LEN(0)) / sizeof(int);
        for (size_t i = 0; i < count; i++) {
            int descriptor;
            memcpy(&descriptor, CMSG_DATA(part) + i * sizeof(int), sizeof descriptor);
            if (num_descriptors < 2) {
                descriptors[num_descriptors] = descriptor;
            } else {
                close(descriptor);
            }
            num_descriptors++;
        }
    }
    return num_descriptors;
}

static void close_both(const int descriptors[2], int num_descriptors) {
    for (int i = 0; i < num_descriptors && i < 2; i++) {
        close(descriptors[i]);
    }
}

/* Asks and reads the answer. Returns whether there was one of this layout; `*is_silent` says that somebody took the
 * question and did not answer in time. */
static bool ask(const uint8_t uuid[ST_UUID_BYTES], uint64_t deadline_ns, struct st_welcome *answer, int descriptors[2],
                int *num_descriptors, bool *is_silent) {
    *num_descriptors = 0;
    *is_silent = false;
    int server = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (server < 0) {
        return false;
    }
    bool is_answered = false;
    struct st_hello hello = {.magic = ST_MAGIC, .layout = ST_LAYOUT};
    memcpy(hello.device_uuid, uuid, ST_UUID_BYTES);
    if (connect(server, (struct sockaddr *)&address, address_bytes) != 0) {
        *is_silent = errno == EAGAIN; /* it listens, and its queue is full */
    } else if (send(server, &hello, sizeof hello, MSG_NOSIGNAL) == (ssize_t)sizeof hello) {
        *is_silent = !wait_readable(server, deadline_ns);
        union {
            struct cmsghdr align;
            char bytes[CMSG_SPACE(8 * sizeof(int))];
        } control;
        struct iovec body = {answer, sizeof *answer};
        struct msghdr message = {
            .msg_iov = &body, .msg_iovlen = 1, .msg_control = control.bytes, .msg_controllen = sizeof control.bytes};
        ssize_t num_bytes = *is_silent ? -1 : recvmsg(server, &message, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
        if (num_bytes >= 0) {
            *num_descriptors = take_descriptors(&message, descriptors);
            is_answered = num_bytes == (ssize_t)sizeof *answer && answer->magic == ST_MAGIC &&
                          answer->layout == ST_LAYOUT && (message.msg_flags & (MSG_TRUNC | MSG_CTRUNC)) == 0;
        }
    }
    close(server);
    return is_answered;
}

/* --- the files ----------------------------------------------------------------------------------------------------- */

/* The mapping of these files in this process, if it has one. */
static struct mapping *find_mapping(uint64_t segment_id, uint32_t slot, const uint8_t uuid[ST_UUID_BYTES]) {
    for (struct mapping *one = atomic_load(&mappings); one != NULL; one = one->next) {
        if (!atomic_load(&one->is_retired) && one->segment_id == segment_id && one->slot == slot &&
            memcmp(one->bucket.grant->device_uuid, uuid, ST_UUID_BYTES) == 0) {
            return one;
        }
    }
    return NULL;
}

/* Room for two files: what a parent left, or new. Nobody else takes one meanwhile: the question is asked under a lock. */
static struct mapping *take_room(void) {
    for (struct mapping *one = atomic_load(&mappings); one != NULL; one = one->next) {
        if (atomic_exchange(&one->is_spare, false)) {
            return one;
        }
    }
    void *memory = mmap(NULL, 2 * ST_SEGMENT_BYTES, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    struct mapping *fresh = memory == MAP_FAILED ? NULL : calloc(1, sizeof *fresh);
    if (fresh == NULL) {
        if (memory != MAP_FAILED) {
            munmap(memory, 2 * ST_SEGMENT_BYTES);
        }
        return NULL;
    }
    fresh->memory = memory;
    fresh->bucket.grant = memory;
    fresh->bucket.usage = (struct st_usage *)(fresh->memory + ST_SEGMENT_BYTES);
    atomic_store(&fresh->is_retired, true);
    fresh->next = atomic_load(&mappings);
    atomic_store(&mappings, fresh);
    return fresh;
}

static bool is_long_enough(int descriptor) {
    struct stat status;
    return fstat(descriptor, &status) == 0 && status.st_size >= ST_SEGMENT_BYTES;
}

/* Whether both files are what the answer said, for this device: a wrong one would hold us by somebody else's tokens. */
static bool are_right(const struct st_bucket *bucket, const struct st_welcome *answer, const uint8_t uuid[ST_UUID_BYTES]) {
    const struct st_grant *grant = bucket->grant;
    const struct st_usage *usage = bucket->usage;
    return grant->magic == ST_MAGIC && grant->layout == ST_LAYOUT && grant->segment_id == answer->segment_id &&
           memcmp(grant->device_uuid, uuid, ST_UUID_BYTES) == 0 && usage->magic == ST_MAGIC &&
           usage->layout == ST_LAYOUT && usage->segment_id == answer->segment_id;
}

static void make_empty(struct mapping *mapping) {
    mmap(mapping->memory, 2 * ST_SEGMENT_BYTES, PROT_READ | PROT_WRITE,
         MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0);
}

static struct st_bucket *map_files(const int descriptors[2], const struct st_welcome *answer,
                                   const uint8_t uuid[ST_UUID_BYTES]) {
    struct mapping *known = find_mapping(answer->segment_id, answer->process_slot, uuid);
    if (known != NULL) {
        return &known->bucket;
    }
    if (answer->process_slot >= ST_NUM_PROCESSES || !is_long_enough(descriptors[0]) || !is_long_enough(descriptors[1])) {
        return NULL;
    }
    struct mapping *fresh = take_room();
    if (fresh == NULL) {
        return NULL;
    }
    void *grant = mmap(fresh->memory, ST_SEGMENT_BYTES, PROT_READ, MAP_SHARED | MAP_FIXED, descriptors[0], 0);
    void *usage = mmap(fresh->memory + ST_SEGMENT_BYTES, ST_SEGMENT_BYTES, PROT_READ | PROT_WRITE,
                       MAP_SHARED | MAP_FIXED, descriptors[1], 0);
    if (grant == MAP_FAILED || usage == MAP_FAILED || !are_right(&fresh->bucket, answer, uuid)) {
        make_empty(fresh);
        atomic_store(&fresh->is_spare, true); /* nobody has ever seen it */
        return NULL;
    }
    fresh->segment_id = answer->segment_id;
    fresh->slot = answer->process_slot;
    fresh->bucket = (struct st_bucket){
        .grant = fresh->bucket.grant,
        .usage = fresh->bucket.usage,
        .process = &fresh->bucket.usage->processes[answer->process_slot],
    };
    /* A program that replaced itself (exec) has its old slot, and none of the threads that waited. What it holds of the
     * device's memory is told as soon as the bucket is its device's. */
    atomic_store(&fresh->bucket.process->num_waiting, 0);
    atomic_store(&fresh->is_retired, false);
    return &fresh->bucket;
}

void st_retire_bucket(struct st_bucket *bucket) {
    struct mapping *mapping = (struct mapping *)bucket;
    atomic_store(&mapping->is_retired, true);
    make_empty(mapping);
}

/* --- the question, as others ask it -------------------------------------------------------------------------------- */

static uint32_t retry_after_silence(void) {
    uint32_t num_before = atomic_fetch_add(&num_unanswered, 1);
    return RETRY_MS << (num_before < MAX_UNANSWERED ? num_before : MAX_UNANSWERED);
}

static uint32_t retry_after_no(const struct st_welcome *answer) {
    uint32_t retry_ms = answer->retry_ms == 0 ? UNKNOWN_RETRY_MS : answer->retry_ms;
    return retry_ms < RETRY_MS ? RETRY_MS : retry_ms > MAX_RETRY_MS ? MAX_RETRY_MS : retry_ms;
}

struct st_bucket *st_ask_daemon_within(const uint8_t uuid[ST_UUID_BYTES], uint64_t patience_ns, uint32_t *retry_ms,
                                       bool *is_no) {
    uint64_t deadline_ns = st_now_ns() + patience_ns;
    *retry_ms = RETRY_MS;
    *is_no = false;
    if (!st_client_has_daemon() || !st_lock_within(&question, patience_ns)) {
        return NULL;
    }
    int cancel_state;
    pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &cancel_state);
    struct st_welcome answer;
    int descriptors[2];
    int num_descriptors;
    bool is_silent;
    struct st_bucket *bucket = NULL;
    if (ask(uuid, deadline_ns, &answer, descriptors, &num_descriptors, &is_silent)) {
        atomic_store(&num_unanswered, 0);
        if (answer.status == ST_OK && num_descriptors == 2) {
            bucket = map_files(descriptors, &answer, uuid);
        }
        *retry_ms = bucket != NULL ? RETRY_MS : retry_after_no(&answer);
        *is_no = answer.status != ST_OK;
    } else if (is_silent) {
        *retry_ms = retry_after_silence();
    }
    close_both(descriptors, num_descriptors);
    st_lock_free(&question);
    pthread_setcancelstate(cancel_state, NULL);
    return bucket;
}

struct st_bucket *st_ask_daemon(const uint8_t uuid[ST_UUID_BYTES], uint32_t *retry_ms) {
    bool is_no;
    return st_ask_daemon_within(uuid, PATIENCE_NS, retry_ms, &is_no);
}

/* A child holds none of its parent's files: what it launches is its own, and it asks under its own name. Where nobody
 * in it can hold an old bucket any longer, the room can be used again. */
void st_client_forked(void) {
    atomic_store(&question.word, 0);
    atomic_store(&address_lock.word, 0);
    atomic_store(&num_unanswered, 0);
    for (struct mapping *one = atomic_load(&mappings); one != NULL; one = one->next) {
        atomic_store(&one->is_retired, true);
        make_empty(one);
        atomic_store(&one->is_spare, true);
    }
}
