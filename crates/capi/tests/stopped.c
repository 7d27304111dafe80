/* stopped SOCKET PID SOCKET: a daemon that hangs beside one that works. Prints nothing and gives 0 when all is right.
 *
 * The first daemon is stopped. Threads then destroy and open objects of it, which wait as long as it is stopped; that
 * they still wait when the calls on the second daemon are done shows that none of these waited for them. */
#define _GNU_SOURCE
#include "dmalane.h"

#include <dirent.h>
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static atomic_int line_of_failure;
#define CHECK(what) \
    do { \
        if (!(what) && !line_of_failure) { \
            line_of_failure = __LINE__; \
            char error_[200] = ""; \
            dml_last_error(error_, sizeof error_); \
            printf("%s:%d: %s (%s)\n", __FILE__, __LINE__, #what, error_); \
        } \
    } while (0)

enum { LEN = 1 << 16, ROUNDS = 50 };

struct device {
	dml_target target;
	dml_memory memory;
	uint32_t handle;
	uint64_t va, reserved;
	void *data;
};

static char name[300];

static void opened(struct device *device, const char *called)
{
	CHECK(!dml_target_open(called, &device->target));
	CHECK(!dml_memory_create(device->target, LEN, &device->memory, &device->data));
	CHECK(!dml_target_allocate(device->target, LEN, NULL, &device->handle));
	CHECK(!dml_target_reserve(device->target, device->handle, LEN, &device->va, &device->reserved));
	struct dml_vm_op bind = {.flags = DML_BIND | DML_READ | DML_WRITE, .handle = device->handle, .range = LEN,
		.addr = device->va};
	CHECK(!dml_target_bind(device->target, &bind, sizeof bind, 1));
}

static void copied(const struct device *device)
{
	struct dml_target_op op = {.kind = DML_TO_DEVICE, .user = 5, .len = LEN, .at = device->va,
		.memory = device->memory};
	struct dml_completion done;
	size_t count;
	CHECK(!dml_target_submit(device->target, &op, sizeof op, 1, &count) && count == 1);
	CHECK(!dml_target_poll(device->target, &done, 1, UINT64_MAX, &count) && count == 1);
	CHECK(!done.result && done.bytes == LEN && done.user == 5);
}

/* Calls that wait for the stopped daemon. */
struct waiting {
	int32_t (*call)(uint64_t object);
	uint64_t object;
	atomic_int begun, ended;
	int32_t result;
	pthread_t thread;
};

static void *wait_for(void *argument)
{
	struct waiting *waiting = argument;
	waiting->begun = 1;
	waiting->result = waiting->call(waiting->object);
	waiting->ended = 1;
	return NULL;
}

static int32_t open_another(uint64_t unused)
{
	dml_target target;
	(void)unused;
	int32_t result = dml_target_open(name, &target);
	return result ? result : dml_target_close(target);
}

static int32_t create_another(uint64_t target)
{
	dml_memory memory;
	void *data;
	int32_t result = dml_memory_create(target, LEN, &memory, &data);
	return result ? result : dml_memory_destroy(memory);
}

static void begin(struct waiting *waiting, int32_t (*call)(uint64_t), uint64_t object)
{
	waiting->call = call, waiting->object = object;
	CHECK(!pthread_create(&waiting->thread, NULL, wait_for, waiting));
	while (!waiting->begun) usleep(100);
	usleep(20000); /* so that it is likely to be at it; the test is right if it is not */
}

/* The state of a process or thread, and the group of its process, of a file stat of /proc; 0 where there is none. */
static int state_of(const char *path, int *group)
{
	char text[600];
	FILE *file = fopen(path, "r");
	size_t len = file ? fread(text, 1, sizeof text - 1, file) : 0;
	text[len] = 0;
	if (file) fclose(file);
	char state = 0, *name_end = strrchr(text, ')');
	return name_end && sscanf(name_end + 1, " %c %*d %d", &state, group) == 2 ? state : 0;
}

/* True while a thread of a process of this group runs. */
static int runs(pid_t group)
{
	char path[600];
	int of = 0, running = 0;
	DIR *processes = opendir("/proc");
	CHECK(processes);
	for (struct dirent *process; processes && (process = readdir(processes));) {
		snprintf(path, sizeof path, "/proc/%.20s/stat", process->d_name);
		if (process->d_name[0] < '1' || process->d_name[0] > '9' || !state_of(path, &of) || of != group) continue;
		snprintf(path, sizeof path, "/proc/%.20s/task", process->d_name);
		DIR *tasks = opendir(path);
		for (struct dirent *task; tasks && (task = readdir(tasks));) {
			if (task->d_name[0] == '.') continue;
			snprintf(path, sizeof path, "/proc/%.20s/task/%.20s/stat", process->d_name, task->d_name);
			int state = state_of(path, &of);
			running |= state && state != 'T';
		}
		if (tasks) closedir(tasks);
	}
	if (processes) closedir(processes);
	return running;
}

/* Stops all processes of a group: each of their threads goes on for a moment after the signal. */
static void stop(pid_t group)
{
	CHECK(!kill(-group, SIGSTOP));
	while (runs(group) && !line_of_failure) usleep(1000);
}

static void beside_a_stopped_daemon(pid_t pid, const char *second)
{
	struct device hung, closing, creating, works;
	static struct waiting waiting[4];
	char path[] = "/tmp/dmalane-capi-XXXXXX";
	int file = mkstemp(path);
	CHECK(file >= 0 && write(file, path, sizeof path) == sizeof path && !unlink(path));
	opened(&hung, name), opened(&closing, name), opened(&creating, name), opened(&works, second);
	copied(&hung), copied(&closing), copied(&works);
	if (line_of_failure) return;
	stop(pid);
	begin(&waiting[0], dml_memory_destroy, hung.memory);
	begin(&waiting[1], dml_target_close, closing.target);
	begin(&waiting[2], open_another, 0);
	begin(&waiting[3], create_another, creating.target);

	/* The objects are gone for everybody, although what is behind them is not. */
	CHECK(dml_memory_destroy(hung.memory) == -ENOENT && dml_target_close(closing.target) == -ENOENT);
	struct dml_target_info info;
	CHECK(dml_target_info(closing.target, &info) == -ENOENT);
	for (int i = 0; i < ROUNDS && !line_of_failure; i++) {
		struct device other;
		struct dml_read_config config = {.size = sizeof config};
		struct dml_filled filled;
		dml_buffer buffer;
		dml_memory memory;
		dml_load load;
		void *data;
		dml_device device;
		uint32_t bo;
		struct dml_segment segment = {.pa = 0, .len = 4096};
		copied(&works);
		CHECK(!dml_memory_create(works.target, LEN, &memory, &data) && !dml_memory_destroy(memory));
		CHECK(!dml_target_info(works.target, &info));
		CHECK(!dml_alloc_and_read(file, &config, &buffer, &filled) && filled.len == sizeof path);
		CHECK(!dml_buffer_destroy(buffer));
		CHECK(!dml_device_create(&device) && !dml_bo_create(device, &segment, 1, &bo));
		CHECK(!dml_bo_destroy(device, bo) && !dml_device_destroy(device));
		/* The first round took no time beside their time limits. */
		for (int n = 0; n < 4 && i == 0; n++) CHECK(!waiting[n].ended);
		if (i % 10) continue;
		CHECK(!dml_target_load(works.target, "/proc/self/exe", NULL, 0, &load) && !dml_load_destroy(load));
		opened(&other, second), copied(&other);
		CHECK(!dml_target_close(other.target) && !dml_memory_destroy(other.memory));
	}
	CHECK(!kill(-pid, SIGCONT));
	for (int i = 0; i < 4; i++) CHECK(!pthread_join(waiting[i].thread, NULL));
	CHECK(!waiting[0].result && !waiting[1].result);
	CHECK(!dml_target_close(hung.target) && dml_target_close(hung.target) == -ENOENT);
	CHECK(!dml_memory_destroy(closing.memory) && dml_memory_destroy(closing.memory) == -ENOENT);
	CHECK(!dml_target_close(creating.target) && !dml_memory_destroy(creating.memory));
	CHECK(!dml_target_close(works.target) && !dml_memory_destroy(works.memory));
	CHECK(!close(file));
}

/* Two threads that do the same to one object, at once. */
struct both {
	int32_t (*call)(uint64_t);
	uint64_t object;
	pthread_barrier_t barrier;
	atomic_int done, gone;
};

static void *one_of_both(void *argument)
{
	struct both *both = argument;
	pthread_barrier_wait(&both->barrier);
	int32_t result = both->call(both->object);
	CHECK(!result || result == -ENOENT);
	atomic_fetch_add(result ? &both->gone : &both->done, 1);
	return NULL;
}

static void twice(int32_t (*call)(uint64_t), uint64_t object)
{
	struct both both = {.call = call, .object = object};
	pthread_t threads[2];
	pthread_barrier_init(&both.barrier, NULL, 2);
	for (int i = 0; i < 2; i++) CHECK(!pthread_create(&threads[i], NULL, one_of_both, &both));
	for (int i = 0; i < 2; i++) CHECK(!pthread_join(threads[i], NULL));
	CHECK(both.done == 1 && both.gone == 1);
	pthread_barrier_destroy(&both.barrier);
	CHECK(call(object) == -ENOENT);
}

static atomic_int copies;

/* Copies until somebody else has closed the target. */
static void *until_closed(void *argument)
{
	const struct device *device = argument;
	struct dml_target_op op = {.kind = DML_TO_HOST, .len = LEN, .at = device->va, .memory = device->memory};
	struct dml_completion done;
	size_t count;
	int32_t result;
	for (;;) {
		result = dml_target_submit(device->target, &op, sizeof op, 1, &count);
		if (result == -ENOENT) return NULL;
		CHECK(!result);
		do result = dml_target_poll(device->target, &done, 1, 1000, &count);
		while (!result && !count && !line_of_failure);
		CHECK(!result && !done.result); /* what was accepted is polled: it keeps the target open */
		if (line_of_failure) return NULL;
		atomic_fetch_add(&copies, 1);
	}
}

static int32_t next_of(uint64_t stream)
{
	dml_host_tensor tensor;
	struct dml_filled filled;
	return dml_stream_next(stream, &tensor, &filled, NULL, 0);
}

/* A stream that waits for memory, and is destroyed meanwhile. */
static void destroyed_stream(void)
{
	enum { TENSOR = 16 << 20 };
	static const char zeroes[2 * TENSOR];
	char path[] = "/tmp/dmalane-capi-XXXXXX.safetensors", header[512];
	const char *paths[] = {path};
	int n = snprintf(header + 8, sizeof header - 8,
		"{\"a\":{\"dtype\":\"U8\",\"shape\":[%d],\"data_offsets\":[0,%d]},"
		"\"b\":{\"dtype\":\"U8\",\"shape\":[%d],\"data_offsets\":[%d,%d]}}",
		TENSOR, TENSOR, TENSOR, TENSOR, 2 * TENSOR);
	uint64_t length = (uint64_t)n;
	memcpy(header, &length, sizeof length);
	int file = mkstemps(path, 12);
	CHECK(file >= 0 && write(file, header, n + 8) == n + 8);
	CHECK(write(file, zeroes, sizeof zeroes) == (ssize_t)sizeof zeroes);
	struct dml_model_config config = {.size = sizeof config, .memory_limit = TENSOR + (1 << 20)};
	struct waiting waiting = {.result = -ENOMEM};
	/* It gives up after half a second; on a busy machine the other thread may be later. */
	for (int i = 0; i < 20 && waiting.result == -ENOMEM && !line_of_failure; i++) {
		dml_model model;
		dml_stream stream;
		dml_host_tensor tensor;
		struct dml_filled filled;
		CHECK(!dml_model_open(paths, 1, &config, &model) && !dml_model_stream(model, &stream));
		CHECK(!dml_stream_next(stream, &tensor, &filled, NULL, 0));
		waiting.begun = 0;
		begin(&waiting, next_of, stream);
		CHECK(!dml_stream_destroy(stream) && !pthread_join(waiting.thread, NULL));
		CHECK(!dml_host_tensor_destroy(tensor) && !dml_model_destroy(model));
	}
	CHECK(waiting.result == -ENOENT);
	CHECK(!unlink(path) && !close(file));
}

static void two_threads(const char *second)
{
	char path[] = "/tmp/dmalane-capi-XXXXXX";
	int file = mkstemp(path);
	CHECK(file >= 0 && write(file, path, sizeof path) == sizeof path);
	for (int i = 0; i < 20 && !line_of_failure; i++) {
		struct device device;
		struct dml_read_config config = {.size = sizeof config};
		struct dml_model_config model_config = {.size = sizeof model_config};
		const char *paths[] = {path};
		struct dml_filled filled;
		dml_buffer buffer;
		dml_model model;
		dml_stream stream;
		dml_load load;
		pthread_t thread;
		opened(&device, second);
		CHECK(!dml_alloc_and_read(file, &config, &buffer, &filled));
		twice(dml_buffer_destroy, buffer);
		CHECK(!dml_model_open(paths, 1, &model_config, &model) && !dml_model_stream(model, &stream));
		twice(dml_stream_destroy, stream);
		twice(dml_model_destroy, model);
		CHECK(!dml_target_load(device.target, path, NULL, 0, &load));
		/* One thread copies, another closes. */
		copies = 0;
		CHECK(!pthread_create(&thread, NULL, until_closed, &device));
		while (copies < 5 && !line_of_failure) usleep(100);
		int32_t closed;
		while ((closed = dml_target_close(device.target)) == -EBUSY) {}
		CHECK(!closed && !pthread_join(thread, NULL));
		CHECK(dml_target_close(device.target) == -ENOENT);
		/* Loads and memories outlive the target. */
		twice(dml_load_destroy, load);
		twice(dml_memory_destroy, device.memory);
		CHECK(!dml_target_open(second, &device.target));
		twice(dml_target_close, device.target);
	}
	CHECK(!unlink(path) && !close(file));
}

int main(int argc, char **argv)
{
	char second[300];
	if (argc != 4) return 2;
	snprintf(name, sizeof name, "daemon:%s", argv[1]);
	snprintf(second, sizeof second, "daemon:%s", argv[3]);
	beside_a_stopped_daemon((pid_t)atoi(argv[2]), second);
	destroyed_stream();
	two_threads(second);
	two_threads("soft");
	return line_of_failure ? 1 : 0;
}
