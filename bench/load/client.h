/* A blocking AMQP connection with one channel: URL, handshake, calls that wait for an answer,
 * reading.
 *
 * A failure is reported once, in the broker's words, and ends the run: `fail` keeps the first
 * message and sets `stop`. Sockets block for at most POLL_MS, so every loop sees `stop`. */
#ifndef AMQPLOAD_CLIENT_H
#define AMQPLOAD_CLIENT_H

#include <errno.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

#include "frames.h"
#include "histogram.h"

enum {
    POLL_MS = 100,
    ANSWER_MS_MAX = 30000,
    FRAME_BYTES_WANTED = 131072,
    READ_BYTES = 256 << 10,
    INPUT_BYTES = 512 << 10
};
_Static_assert(
    INPUT_BYTES >= READ_BYTES + FRAME_BYTES_WANTED, "a partial frame and a read fit together");

static atomic_bool stop;    /* something failed, or the run is over */
static atomic_bool failed;
static char failure[512];
static pthread_mutex_t failure_lock = PTHREAD_MUTEX_INITIALIZER;

__attribute__((format(printf, 1, 2))) static inline void fail(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    pthread_mutex_lock(&failure_lock);
    if (!failed) {
        vsnprintf(failure, sizeof failure, format, arguments);
        for (char *c = failure; *c; c++)
            if (*c == '"' || *c == '\\' || (unsigned char)*c < ' ')
                *c = '\''; /* the text is printed inside JSON */
        failed = true;
    }
    pthread_mutex_unlock(&failure_lock);
    va_end(arguments);
    stop = true;
}

/* ---- URL ------------------------------------------------------------------------------------- */

typedef struct {
    char user[128], password[128], host[256], port[8], vhost[256];
} address;

static inline void percent_decode(char *to, size_t room, const char *from, size_t bytes) {
    size_t n = 0;
    for (size_t i = 0; i < bytes && n + 1 < room; i++) {
        if (from[i] == '%' && i + 2 < bytes) {
            char hex[3] = {from[i + 1], from[i + 2], 0};
            to[n++] = (char)strtol(hex, NULL, 16);
            i += 2;
        } else to[n++] = from[i];
    }
    to[n] = 0;
}

/* Parse amqp://user:password@host:port/vhost. Missing parts are guest, guest, 5672 and "/". */
static inline bool parse_url(const char *url, address *a) {
    *a = (address){.user = "guest", .password = "guest", .port = "5672", .vhost = "/"};
    if (strncmp(url, "amqp://", 7)) return false;
    const char *rest = url + 7, *slash = strchr(rest, '/');
    const char *end = slash ? slash : rest + strlen(rest);
    const char *at = memchr(rest, '@', (size_t)(end - rest));
    if (at) {
        const char *colon = memchr(rest, ':', (size_t)(at - rest));
        percent_decode(a->user, sizeof a->user, rest, (size_t)((colon ? colon : at) - rest));
        if (colon)
            percent_decode(a->password, sizeof a->password, colon + 1, (size_t)(at - colon - 1));
        rest = at + 1;
    }
    const char *host = rest, *host_end = memchr(rest, ':', (size_t)(end - rest)), *port = host_end;
    if (*rest == '[') { /* [::1]:5672 */
        host++;
        if (!(host_end = memchr(rest, ']', (size_t)(end - rest)))) return false;
        port = host_end[1] == ':' ? host_end + 1 : NULL;
    }
    if (port && (size_t)(end - port) <= sizeof a->port)
        percent_decode(a->port, sizeof a->port, port + 1, (size_t)(end - port - 1));
    percent_decode(a->host, sizeof a->host, host, (size_t)((host_end ? host_end : end) - host));
    if (slash && slash[1]) percent_decode(a->vhost, sizeof a->vhost, slash + 1, strlen(slash + 1));
    return a->host[0] != 0;
}

/* ---- connection ------------------------------------------------------------------------------ */

typedef struct connection {
    int fd;
    size_t frame_bytes_max;
    uint8_t *input;
    size_t input_start, input_end;
    scanner scan;
    bool blocked;
    bool closed; /* close-ok came, or the broker hung up during the wait for close-ok */
    uint32_t awaited;         /* the answer that a call waits for, 0 when the answer has come */
    uint64_t awaited_more;    /* further answers of this kind in a pipeline */
    bool channel_may_close;   /* a refusal of the current call is an answer, not a failure */
    bool refused;
    void (*on_confirm)(struct connection *, uint64_t tag, bool multiple, bool positive);
    void *owner;
} connection;

static inline int wait_for(connection *c, short events, int ms) {
    struct pollfd p = {.fd = c->fd, .events = events};
    int n = poll(&p, 1, ms);
    return n > 0 ? p.revents : 0;
}

/* Write methods. A producer's batches have their own loop, which reads while it waits. */
static inline bool write_all(connection *c, const uint8_t *bytes, size_t size) {
    uint64_t give_up = now_ns() + (uint64_t)ANSWER_MS_MAX * 1000000u;
    for (size_t at = 0; at < size;) {
        ssize_t n = send(c->fd, bytes + at, size - at, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (n > 0) at += (size_t)n;
        else if (n < 0 && errno != EAGAIN && errno != EINTR)
            return fail("cannot write: %s", strerror(errno)), false;
        else if (now_ns() > give_up)
            return fail("the broker has not read for %d s", ANSWER_MS_MAX / 1000), false;
        else wait_for(c, POLLOUT, POLL_MS);
    }
    return true;
}

static inline void answer_empty(connection *c, unsigned channel, uint32_t method) {
    buffer b = {0};
    begin_method(&b, channel, method);
    if (method == CHANNEL_FLOW_OK) put8(&b, 1);
    end_frame(&b);
    write_all(c, b.bytes, b.size);
    free(b.bytes);
}

static inline void on_close(
    connection *c, const char *what, const uint8_t *arguments, size_t bytes) {
    if (bytes < 3 || bytes < 3u + arguments[2]) { fail("%s, cut short", what); return; }
    fail("%s by the broker: %u %.*s", what, be16(arguments), arguments[2], arguments + 3);
    c->closed = true;
}

static inline void on_channel_close(
    connection *c, unsigned channel, const uint8_t *arguments, size_t bytes) {
    if (!c->channel_may_close) { on_close(c, "channel closed", arguments, bytes); return; }
    answer_empty(c, channel, CHANNEL_CLOSE_OK);
    c->refused = true;
    c->awaited = 0;
}

static inline void tune(connection *c, const uint8_t *arguments) {
    uint32_t offered = be32(arguments + 2);
    c->frame_bytes_max = offered && offered < FRAME_BYTES_WANTED ? offered : FRAME_BYTES_WANTED;
    c->scan.frame_bytes_max = (uint32_t)c->frame_bytes_max;
}

static inline void on_method(
    scanner *s, unsigned channel, uint32_t method, const uint8_t *arguments, size_t bytes) {
    connection *c = s->owner;
    if (method == c->awaited) {
        if (c->awaited_more) { c->awaited_more--; return; }
        c->awaited = 0;
        if (method == CONNECTION_TUNE && bytes >= 8) tune(c, arguments);
        if (method == CONNECTION_CLOSE_OK) c->closed = true;
        return;
    }
    switch (method) {
        case BASIC_ACK:
        case BASIC_NACK:
            if (bytes < 9 || !c->on_confirm) fail("a confirm nobody asked for");
            else c->on_confirm(c, be64(arguments), arguments[8] & 1, method == BASIC_ACK);
            break;
        case CONNECTION_BLOCKED: c->blocked = true; break;
        case CONNECTION_UNBLOCKED: c->blocked = false; break;
        case CHANNEL_FLOW:
            c->blocked = bytes && !(arguments[0] & 1);
            answer_empty(c, channel, CHANNEL_FLOW_OK);
            break;
        case CONNECTION_CLOSE: on_close(c, "connection closed", arguments, bytes); break;
        case CHANNEL_CLOSE: on_channel_close(c, channel, arguments, bytes); break;
        case BASIC_CANCEL: fail("a consumer was cancelled by the broker"); break;
        case BASIC_RETURN: fail("a message was returned as unroutable"); break;
        default: fail("unexpected method %u.%u", method >> 16, method & 0xffff);
    }
}

/* Read once and scan. With `flags` 0 wait for at most POLL_MS, with MSG_DONTWAIT do not wait.
 * Return false when nothing came. */
static inline bool receive(connection *c, int flags) {
    if (INPUT_BYTES - c->input_end < READ_BYTES) {
        memmove(c->input, c->input + c->input_start, c->input_end - c->input_start);
        c->input_end -= c->input_start;
        c->input_start = 0;
    }
    ssize_t n = recv(c->fd, c->input + c->input_end, READ_BYTES, flags);
    if (n < 0 && (errno == EAGAIN || errno == EINTR)) return false;
    if (n <= 0) {
        if (c->awaited != CONNECTION_CLOSE_OK)
            fail("the broker hung up%s%s", n ? ": " : "", n ? strerror(errno) : "");
        c->closed = true;
        return false;
    }
    c->input_end += (size_t)n;
    c->input_start +=
        scan_frames(&c->scan, c->input + c->input_start, c->input_end - c->input_start);
    if (c->scan.error) fail("broken stream: %s", c->scan.error);
    if (c->input_start == c->input_end) c->input_start = c->input_end = 0;
    return true;
}

static inline bool await(connection *c, uint32_t method, int ms_max) {
    uint64_t give_up = now_ns() + (uint64_t)ms_max * 1000000u;
    c->awaited = method;
    while (c->awaited && !c->closed && now_ns() < give_up) receive(c, 0);
    return !c->awaited;
}

/* Send the bytes of `b`, empty `b`, and wait for the answer. Return false after a refusal or a
 * failure. */
static inline bool call(connection *c, buffer *b, uint32_t answer, const char *what) {
    c->refused = false;
    bool written = write_all(c, b->bytes, b->size);
    b->size = 0;
    if (!written) return false;
    if (!await(c, answer, ANSWER_MS_MAX)) fail("no answer to %s", what);
    return !c->refused && !c->closed && c->awaited == 0;
}

/* Send the `count` requests of one kind in `b` before the first answer is read. */
static inline bool call_many(
    connection *c, buffer *b, uint64_t count, uint32_t answer, const char *what) {
    c->awaited_more = count - 1;
    return call(c, b, answer, what);
}

static inline int connect_to(const address *a) {
    struct addrinfo hints = {.ai_socktype = SOCK_STREAM}, *found, *i;
    int error = getaddrinfo(a->host, a->port, &hints, &found), fd = -1;
    if (error) return fail("%s:%s: %s", a->host, a->port, gai_strerror(error)), -1;
    for (i = found; i; i = i->ai_next) {
        fd = socket(i->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
        if (fd >= 0 && !connect(fd, i->ai_addr, i->ai_addrlen)) break;
        error = errno;
        if (fd >= 0) close(fd);
        fd = -1;
    }
    freeaddrinfo(found);
    if (fd < 0) return fail("cannot connect to %s:%s: %s", a->host, a->port, strerror(error)), -1;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &(int){1}, sizeof(int));
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &(struct timeval){.tv_usec = POLL_MS * 1000},
        sizeof(struct timeval));
    return fd;
}

static inline void put_capabilities(buffer *b) {
    static const char *const names[] = {"authentication_failure_close", "publisher_confirms",
        "basic.nack", "connection.blocked", "consumer_cancel_notify"};
    buffer table = {0}, outer = {0};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        put_short(&table, names[i]), put8(&table, 't'), put8(&table, 1);
    put_short(&outer, "product"), put8(&outer, 'S'), put_long(&outer, "amqpload", 8);
    put_short(&outer, "capabilities"), put8(&outer, 'F'), put_long(&outer, table.bytes, table.size);
    put_long(b, outer.bytes, outer.size);
    free(table.bytes), free(outer.bytes);
}

static inline bool login(connection *c, const address *a, buffer *b) {
    char plain[sizeof a->user + sizeof a->password + 2];
    int plain_bytes = snprintf(plain, sizeof plain, "%c%s%c%s", 0, a->user, 0, a->password);
    put_bytes(b, "AMQP\0\0\11\1", 8);
    if (!call(c, b, CONNECTION_START, "the protocol header")) return false;
    begin_method(b, 0, CONNECTION_START_OK);
    put_capabilities(b), put_short(b, "PLAIN"), put_long(b, plain, (size_t)plain_bytes),
        put_short(b, "en_US");
    end_frame(b);
    if (!call(c, b, CONNECTION_TUNE, "connection.start-ok (wrong user or password?)")) return false;
    begin_method(b, 0, CONNECTION_TUNE_OK);
    /* --ops channel opens and closes channel 2 */
    put16(b, 2), put32(b, (uint32_t)c->frame_bytes_max), put16(b, 0);
    end_frame(b);
    begin_method(b, 0, CONNECTION_OPEN);
    put_short(b, a->vhost), put_short(b, ""), put8(b, 0);
    end_frame(b);
    return call(c, b, CONNECTION_OPEN_OK, "connection.open");
}

static inline bool open_channel(connection *c) {
    buffer b = {0};
    begin_method(&b, 1, CHANNEL_OPEN), put_short(&b, "");
    end_frame(&b);
    bool done = call(c, &b, CHANNEL_OPEN_OK, "channel.open");
    free(b.bytes);
    return done;
}

/* Brokers give a handshake about ten seconds, however many clients come at once. */
enum { LOGINS_AT_ONCE = 16 };
static sem_t logins;

/* Return a connection with channel 1 open, or NULL after a failure. */
static inline connection *open_connection(const address *a) {
    while (sem_wait(&logins)) {}
    int fd = connect_to(a);
    if (fd < 0) return sem_post(&logins), NULL;
    connection *c = calloc(1, sizeof *c);
    *c =
        (connection){.fd = fd, .input = malloc(INPUT_BYTES), .frame_bytes_max = FRAME_BYTES_WANTED};
    c->scan = (scanner){.frame_bytes_max = FRAME_BYTES_WANTED, .owner = c, .on_method = on_method};
    buffer b = {0};
    bool opened = login(c, a, &b) && open_channel(c);
    free(b.bytes);
    sem_post(&logins);
    return opened ? c : NULL;
}

/* Close with connection.close. Its close-ok proves that the broker has taken everything sent
 * before. */
static inline bool close_politely(connection *c, int ms_max) {
    buffer b = {0};
    begin_method(&b, 0, CONNECTION_CLOSE);
    put16(&b, 200), put_short(&b, "done"), put32(&b, 0);
    end_frame(&b);
    bool sent = send(c->fd, b.bytes, b.size, MSG_NOSIGNAL | MSG_DONTWAIT) == (ssize_t)b.size;
    free(b.bytes);
    return sent && await(c, CONNECTION_CLOSE_OK, ms_max);
}

static inline void destroy(connection *c) {
    close(c->fd);
    free(c->input);
    free(c);
}

#endif
