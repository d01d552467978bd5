/* A share daemon inside the test program itself: it gives this process tokens and lets the test read what was used.
 *
 * Needs _GNU_SOURCE before the first header. Call own_daemon_start before the driver's first call; the environment must
 * name the socket. Every device that is asked for gets files of its own, in the order of the questions.
 */
#ifndef OWN_DAEMON_H
#define OWN_DAEMON_H

#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#include "springtide_share.h"

#define OWN_DEVICES 4

struct own_files {
    struct st_grant *grant;
    struct st_usage *usage;
    int descriptors[2];
};

static struct own_files own_files[OWN_DEVICES];
static _Atomic unsigned own_num_files;
static int own_listener;
static uint64_t own_granted_ns;

static uint64_t own_now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static void *own_file(const char *name, int *descriptor, int mode) {
    char path[64];
    int made = memfd_create(name, MFD_CLOEXEC);
    if (made < 0 || ftruncate(made, ST_SEGMENT_BYTES) != 0) {
        abort();
    }
    void *address = mmap(NULL, ST_SEGMENT_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, made, 0);
    snprintf(path, sizeof(path), "/proc/self/fd/%d", made);
    *descriptor = open(path, mode | O_CLOEXEC);
    close(made);
    if (address == MAP_FAILED || *descriptor < 0) {
        abort();
    }
    return address;
}

static struct own_files *own_files_of(const uint8_t *uuid) {
    unsigned num = atomic_load(&own_num_files);
    for (unsigned i = 0; i < num; i++) {
        if (memcmp(own_files[i].grant->device_uuid, uuid, ST_UUID_BYTES) == 0) {
            return &own_files[i];
        }
    }
    if (num == OWN_DEVICES) {
        abort();
    }
    struct own_files *files = &own_files[num];
    files->grant = own_file("grant", &files->descriptors[0], O_RDONLY);
    files->usage = own_file("usage", &files->descriptors[1], O_RDWR);
    files->grant->magic = files->usage->magic = ST_MAGIC;
    files->grant->layout = files->usage->layout = ST_LAYOUT;
    files->grant->segment_id = files->usage->segment_id = 77 + num;
    memcpy(files->grant->device_uuid, uuid, ST_UUID_BYTES);
    files->grant->stale_after_ns = 10000000000u;
    files->grant->max_wait_ns = 2000000000u;
    atomic_store(&files->grant->heartbeat_ns, own_now_ns());
    atomic_store(&files->grant->granted_ns, own_granted_ns);
    atomic_store(&files->usage->processes[0].pid, (uint32_t)getpid());
    atomic_store(&own_num_files, num + 1);
    return files;
}

static void own_answer(int client) {
    struct st_hello hello;
    if (recv(client, &hello, sizeof(hello), 0) != (ssize_t)sizeof(hello)) {
        return;
    }
    struct own_files *files = own_files_of(hello.device_uuid);
    struct st_welcome welcome = {ST_MAGIC, ST_LAYOUT, ST_OK, 0, files->grant->segment_id, 0, 0};
    struct iovec part = {&welcome, sizeof(welcome)};
    _Alignas(struct cmsghdr) char control[CMSG_SPACE(sizeof(files->descriptors))];
    memset(control, 0, sizeof(control));
    struct msghdr message = {NULL, 0, &part, 1, control, sizeof(control), 0};
    struct cmsghdr *head = CMSG_FIRSTHDR(&message);
    head->cmsg_level = SOL_SOCKET;
    head->cmsg_type = SCM_RIGHTS;
    head->cmsg_len = CMSG_LEN(sizeof(files->descriptors));
    memcpy(CMSG_DATA(head), files->descriptors, sizeof(files->descriptors));
    (void)sendmsg(client, &message, MSG_NOSIGNAL);
}

static void *own_serve(void *nothing) {
    for (;;) {
        struct pollfd ready = {own_listener, POLLIN, 0};
        if (poll(&ready, 1, 5) == 1) {
            int client = accept(own_listener, NULL, NULL);
            own_answer(client);
            close(client);
        }
        for (unsigned i = 0; i < atomic_load(&own_num_files); i++) {
            atomic_store(&own_files[i].grant->heartbeat_ns, own_now_ns());
        }
    }
    return nothing;
}

static void own_daemon_start(uint64_t granted_ns) {
    const char *path = getenv(ST_SOCKET_VARIABLE);
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    if (path == NULL || strlen(path) >= sizeof(address.sun_path)) {
        abort();
    }
    own_granted_ns = granted_ns;
    strcpy(address.sun_path, path);
    unlink(path);
    own_listener = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    pthread_t server;
    if (bind(own_listener, (struct sockaddr *)&address, sizeof(address)) != 0 || listen(own_listener, 16) != 0 ||
        pthread_create(&server, NULL, own_serve, NULL) != 0) {
        abort();
    }
    pthread_detach(server);
}

/* What the process has used of the first device so far. */
static inline uint64_t own_used_ns(void) {
    return atomic_load(&own_num_files) == 0 ? 0 : atomic_load(&own_files[0].usage->used_ns);
}

static inline uint64_t own_launches(void) {
    return atomic_load(&own_num_files) == 0 ? 0 : atomic_load(&own_files[0].usage->processes[0].num_launches);
}

#endif
