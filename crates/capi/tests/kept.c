/* Attaches to a model that a keeper has in memory of a GPU, and to one of its name in the host's. */
#include <dmalane.h>

#include <errno.h>
#include <stdio.h>
#include <string.h>

#define CHECK(condition) \
	do { \
		if (!(condition)) { \
			char text[300] = ""; \
			dml_last_error(text, sizeof text); \
			fprintf(stderr, "line %d: %s (%s)\n", __LINE__, #condition, text); \
			return 1; \
		} \
	} while (0)

int main(void)
{
	struct dml_model_config config = {.size = sizeof config};
	struct dml_model_tensor type;
	struct dml_tensor tensor, again;
	struct dml_target_op op = {.kind = DML_TO_HOST};
	struct dml_completion done;
	struct dml_filled filled;
	dml_host_tensor bytes;
	dml_memory memory;
	dml_model model;
	dml_target target;
	dml_load load = 7;
	char name[64];
	size_t count;
	void *data;

	CHECK(!dml_model_open((const char *[]){"kept:m"}, 1, &config, &model));
	CHECK(dml_model_open((const char *[]){"kept:n"}, 1, &config, &(dml_model){0}) == -ENOENT);
	CHECK(!dml_target_open("cuda:0", &target));
	CHECK(dml_target_attach(target, "n", 0, &load) == -ENOENT && load == 0);
	CHECK(dml_target_attach(target, "m", 2, &load) == -EINVAL);
	CHECK(!dml_target_attach(target, "m", DML_LOAD_VERIFY, &load));
	CHECK(!dml_load_type(load, 0, &type, name, sizeof name) && type.dims > 0 && type.shape[0] > 0 && type.dtype[0]);
	CHECK(!dml_load_tensor(load, 0, &tensor, NULL, 0) && tensor.va && tensor.len == type.len);
	CHECK(!dml_load_find(load, name, &again) && again.va == tensor.va);
	CHECK(dml_load_type(load, 1u << 20, &type, NULL, 0) == -ENOENT);

	/* What is there is what the host has. */
	CHECK(!dml_model_read(model, name, &bytes, &filled) && filled.len == tensor.len);
	CHECK(!dml_memory_create(target, tensor.len, &memory, &data));
	op.len = tensor.len;
	op.at = tensor.va;
	op.memory = memory;
	CHECK(!dml_target_submit(target, &op, sizeof op, 1, &count) && count == 1);
	CHECK(!dml_target_poll(target, &done, 1, UINT64_MAX, &count) && count == 1 && !done.result);
	CHECK(!memcmp(data, filled.data, tensor.len));
	CHECK(!dml_memory_destroy(memory) && !dml_host_tensor_destroy(bytes) && !dml_model_destroy(model));
	CHECK(!dml_load_destroy(load) && !dml_target_close(target));
	CHECK(!dml_target_open("ram:1MiB", &target) && dml_target_attach(target, "m", 0, &load) == -EOPNOTSUPP);
	CHECK(!dml_target_close(target));
	return 0;
}
