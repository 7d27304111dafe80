/* Binds memory of a device, sends bytes to it and reads them back: device [NAME], for example vulkan:0. */
#include "dmalane.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void check(int32_t result, const char *what)
{
	char text[512];
	if (result == 0)
		return;
	dml_last_error(text, sizeof text);
	fprintf(stderr, "%s: %s\n", what, text);
	exit(strcmp(what, "open") ? 1 : 2);
}

/* Submits operations, and waits for all of them. */
static void run(dml_target device, const struct dml_target_op *ops, size_t count)
{
	struct dml_completion done[4];
	size_t n;
	check(dml_target_submit(device, ops, sizeof *ops, count, &n), "submit");
	for (; count > 0; count -= n) {
		check(dml_target_poll(device, done, 4, UINT64_MAX, &n), "poll");
		for (size_t i = 0; i < n; i++)
			check(done[i].result, "operation");
	}
}

int main(int argc, char **argv)
{
	enum { LEN = 1 << 20 };
	const char *name = argc > 1 ? argv[1] : "soft";
	dml_target device;
	dml_memory out, back;
	void *sent, *got;
	uint32_t memory;
	uint64_t va, reserved;

	check(dml_target_open(name, &device), "open");
	/* Host memory that the device reaches, and memory of the device. */
	check(dml_memory_create(device, LEN, &out, &sent), "host memory");
	check(dml_memory_create(device, LEN, &back, &got), "host memory");
	check(dml_target_allocate(device, LEN, NULL, &memory), "device memory");
	memset(sent, 0x5a, LEN);

	/* Addresses for it: reserved, then bound. */
	check(dml_target_reserve(device, memory, 0, &va, &reserved), "reserve");
	struct dml_vm_op bind = {.flags = DML_BIND | DML_READ | DML_WRITE, .handle = memory, .range = LEN, .addr = va};
	check(dml_target_bind(device, &bind, sizeof bind, 1), "bind");

	/* To the device in two parts at once, and back. */
	struct dml_target_op to[] = {
		{.kind = DML_TO_DEVICE, .user = 1, .len = LEN / 2, .at = va, .memory = out},
		{.kind = DML_TO_DEVICE, .user = 2, .len = LEN / 2, .at = va + LEN / 2, .memory = out, .offset = LEN / 2},
	};
	struct dml_target_op from = {.kind = DML_TO_HOST, .len = LEN, .at = va, .memory = back};
	run(device, to, 2);
	run(device, &from, 1);
	printf("%s: %d bytes %s\n", name, LEN, memcmp(sent, got, LEN) ? "differ" : "went there and back");

	check(dml_target_release(device, va), "release");
	check(dml_target_free(device, memory), "free");
	check(dml_memory_destroy(out), "destroy");
	check(dml_memory_destroy(back), "destroy");
	check(dml_target_close(device), "close");
	return 0;
}
