/* lost DEVICE PID HOW: a device whose process is killed (HOW is "idle": with nothing in flight; "flying": with
 * operations in flight) or stopped for good ("stopped"; "unmapping": while another thread destroys memory); or killed,
 * with one call after that ("bind", "memory", or the path of a file to load). Prints nothing and gives 0 when all is
 * right. */
#define _GNU_SOURCE
#include "dmalane.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static int failed;
#define CHECK(what) \
    do { \
        if (!(what) && !failed) { \
            failed = 1; \
            char error_[200] = ""; \
            dml_last_error(error_, sizeof error_); \
            printf("%s:%d: %s (%s)\n", __FILE__, __LINE__, #what, error_); \
        } \
    } while (0)

enum { LEN = 1 << 16, OPERATIONS = 8 };
static pid_t group;

static double now(void)
{
	struct timespec at;
	clock_gettime(CLOCK_MONOTONIC, &at);
	return at.tv_sec + at.tv_nsec / 1e9;
}

static void *kill_later(void *killed)
{
	usleep(200000);
	*(double *)killed = now();
	CHECK(!kill(-group, SIGKILL));
	return NULL;
}

static void *destroy(void *memory)
{
	CHECK(!dml_memory_destroy(*(dml_memory *)memory));
	return NULL;
}

int main(int argc, char **argv)
{
	if (argc != 4) return 2;
	group = atoi(argv[2]);
	int idle = !strcmp(argv[3], "idle"), unmapping = !strcmp(argv[3], "unmapping");
	int stopped = unmapping || !strcmp(argv[3], "stopped");
	dml_target target;
	dml_memory memory;
	uint32_t handle;
	uint64_t va, reserved;
	void *data;
	CHECK(!dml_target_open(argv[1], &target));
	CHECK(!dml_memory_create(target, OPERATIONS * LEN, &memory, &data));
	CHECK(!dml_target_allocate(target, OPERATIONS * LEN, NULL, &handle));
	CHECK(!dml_target_reserve(target, handle, OPERATIONS * LEN, &va, &reserved));
	struct dml_vm_op bind = {.flags = DML_BIND | DML_READ | DML_WRITE, .handle = handle, .range = OPERATIONS * LEN,
		.addr = va};
	CHECK(!dml_target_bind(target, &bind, sizeof bind, 1));
	struct dml_target_op ops[OPERATIONS];
	struct dml_completion done[OPERATIONS];
	size_t count;
	memset(ops, 0, sizeof ops);
	for (int i = 0; i < OPERATIONS; i++) {
		ops[i].kind = i % 2 ? DML_TO_HOST : DML_TO_DEVICE;
		ops[i].user = i, ops[i].len = LEN, ops[i].offset = i * LEN, ops[i].at = va + i * LEN;
		ops[i].memory = memory;
	}
	CHECK(!dml_target_submit(target, ops, sizeof *ops, 1, &count) && count == 1);
	CHECK(!dml_target_poll(target, done, 1, UINT64_MAX, &count) && count == 1 && !done[0].result);
	/* A child of fork() takes nothing away. */
	pid_t child = fork();
	if (!child) {
		alarm(20);
		CHECK(dml_target_submit(target, ops, sizeof *ops, 1, &count) == -ENODEV);
		CHECK(dml_target_close(target) == -ENODEV && !dml_memory_destroy(memory));
		_exit(failed);
	}
	if (!failed && !idle && !stopped && strcmp(argv[3], "flying")) {
		dml_load load;
		dml_memory more;
		CHECK(!kill(-group, SIGKILL));
		usleep(200000);
		bind.addr += OPERATIONS * LEN / 2, bind.range /= 2;
		int32_t result = !strcmp(argv[3], "bind") ? dml_target_bind(target, &bind, sizeof bind, 1)
			: !strcmp(argv[3], "memory")      ? dml_memory_create(target, LEN, &more, &data)
							  : dml_target_load(target, argv[3], NULL, 0, &load);
		if (result != -ENODEV) printf("%s: %d\n", argv[3], result);
		CHECK(result == -ENODEV);
		return failed;
	}
	int status = -1;
	CHECK(waitpid(child, &status, 0) == child && status == 0);
	CHECK(!dml_target_submit(target, ops, sizeof *ops, 1, &count) && count == 1);
	CHECK(!dml_target_poll(target, done, 1, UINT64_MAX, &count) && count == 1 && !done[0].result);
	if (failed) return 1;

	double lost = now();
	pthread_t killer, destroyer;
	dml_memory unmapped;
	if (unmapping) CHECK(!dml_memory_create(target, LEN, &unmapped, &data));
	if (idle) {
		CHECK(!kill(-group, SIGKILL));
	} else {
		CHECK(!kill(-group, SIGSTOP));
		usleep(100000); /* its threads go on for a moment */
		if (!stopped) CHECK(!pthread_create(&killer, NULL, kill_later, &lost));
		if (unmapping) CHECK(!pthread_create(&destroyer, NULL, destroy, &unmapped));
	}
	/* It may be noticed here, or later. */
	int32_t result = dml_target_submit(target, ops, sizeof *ops, OPERATIONS, &count);
	CHECK(!result || result == -ENODEV);
	size_t accepted = count, ended = 0, without = 0;
	while (ended < accepted && !failed) {
		CHECK(!dml_target_poll(target, done, OPERATIONS, UINT64_MAX, &count) && count);
		for (size_t i = 0; i < count; i++) {
			CHECK(!done[i].result || done[i].result == -ENODEV);
			without += done[i].result == -ENODEV;
		}
		ended += count;
	}
	if (!idle && !stopped) CHECK(!pthread_join(killer, NULL));
	if (unmapping) CHECK(!pthread_join(destroyer, NULL));
	CHECK(idle || without);
	/* 2 s, after the 10 s in which a process may answer; and a machine that is busy. */
	CHECK(now() - lost < (stopped ? 25 : 10));

	result = dml_target_submit(target, ops, sizeof *ops, 1, &count);
	if (!result && idle) CHECK(!dml_target_poll(target, done, 1, UINT64_MAX, &count) && done[0].result == -ENODEV);
	CHECK(result == -ENODEV || (idle && !result));
	CHECK(dml_target_submit(target, ops, sizeof *ops, 1, &count) == -ENODEV && !count);
	CHECK(dml_target_restart(target) == -ENODEV);
	dml_memory more;
	CHECK(dml_memory_create(target, LEN, &more, &data) == -ENODEV);
	int32_t stop = dml_target_stop(target);
	CHECK(!stop);
	CHECK(!dml_memory_destroy(memory) && dml_memory_destroy(memory) == -ENOENT);
	CHECK(!dml_target_close(target) && dml_target_close(target) == -ENOENT);
	return failed;
}
