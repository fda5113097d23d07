// A whole program against CertKV's C interface: puts a sequence, reads attention with certificates,
// checks them and the outputs against attention computed here in double, and asks for the request's
// risk. Usage: attend [TARGET], as in `attend unix:/run/certkv/certkvd.sock`.
#include <certkv/certkv.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum {
  kLayers = 2,
  kKvHeads = 2,
  kGroup = 3,
  kQueryHeads = kKvHeads * kGroup,
  kDim = 64,
  kTokens = 300,  // four blocks of 64 and a tail of 44
  kRow = kKvHeads * kDim
};

// Keys and values as the store has them, 16-bit floats, and as this program computes with them.
static uint16_t keys[kLayers][kTokens][kRow], values[kLayers][kTokens][kRow];
static double key_of[kLayers][kTokens][kRow], value_of[kLayers][kTokens][kRow];
static float queries[kLayers][kQueryHeads][kDim];

// In [-1, 1), in steps of 2^-9, which a 16-bit float holds exactly; the same numbers in every run.
static double next_number(void) {
  static uint32_t state = 12345;
  state = state * 1664525u + 1013904223u;
  return (double)((int)(state >> 22) - 512) / 512;
}

// The 16-bit float of a multiple of 2^-9 in [-1, 1).
static uint16_t half_of(double number) {
  if (number == 0) return 0;
  int exponent = 0;
  const double fraction = frexp(fabs(number), &exponent);  // [0.5, 1)
  const unsigned mantissa = (unsigned)(fraction * 2048) & 1023u;
  return (uint16_t)((number < 0 ? 0x8000u : 0u) | (unsigned)(exponent + 14) << 10 | mantissa);
}

static void make_numbers(void) {
  for (int layer = 0; layer < kLayers; ++layer) {
    for (int token = 0; token < kTokens; ++token) {
      for (int i = 0; i < kRow; ++i) {
        key_of[layer][token][i] = next_number();
        value_of[layer][token][i] = next_number();
        keys[layer][token][i] = half_of(key_of[layer][token][i]);
        values[layer][token][i] = half_of(value_of[layer][token][i]);
      }
    }
    for (int head = 0; head < kQueryHeads; ++head) {
      for (int i = 0; i < kDim; ++i) queries[layer][head][i] = (float)(9 * next_number());
    }
  }
}

// Plain attention of one query head over all tokens.
static void attend_in_double(int layer, int head, double* output) {
  static double weight[kTokens];
  const int first = head / kGroup * kDim;
  double largest = -INFINITY, sum = 0;
  for (int token = 0; token < kTokens; ++token) {
    double logit = 0;
    for (int i = 0; i < kDim; ++i) {
      logit += queries[layer][head][i] * key_of[layer][token][first + i];
    }
    weight[token] = logit / 8;  // 1 / sqrt(64)
    largest = fmax(largest, weight[token]);
  }
  for (int token = 0; token < kTokens; ++token) {
    weight[token] = exp(weight[token] - largest);
    sum += weight[token];
  }
  for (int i = 0; i < kDim; ++i) {
    output[i] = 0;
    for (int token = 0; token < kTokens; ++token) {
      output[i] += weight[token] / sum * value_of[layer][token][first + i];
    }
  }
}

// Ends the program with what the library says of its last call, unless that went well.
static void check(certkv_status status, const char* what) {
  if (status == CERTKV_OK) return;
  fprintf(stderr, "%s: %s [%s] %s\n", what, certkv_status_name(status), certkv_error_reason(),
          certkv_error_message());
  exit(1);
}

// Holds one layer's outputs against the truth; how many heads are not as their certificates say.
static int count_wrong(int layer, const certkv_certificate* certificates, float* outputs) {
  int wrong = 0;
  for (int head = 0; head < kQueryHeads; ++head) {
    const certkv_certificate* c = &certificates[head];
    double truth[kDim], square = 0;
    attend_in_double(layer, head, truth);
    for (int i = 0; i < kDim; ++i) {
      const double difference = outputs[head * kDim + i] - truth[i];
      square += difference * difference;
    }
    const double error = sqrt(square);
    const int is_allowed =
        c->outcome == CERTKV_EXACT || (c->outcome == CERTKV_CERTIFIED && c->worst_case_tv <= 0.1f);
    // Written so that a NaN is wrong. Two outputs of such values are 16 apart at most, so a bound
    // of more than an eighth of that would say little.
    const int is_good = is_allowed && error <= c->output_error_bound && c->output_error_bound < 2;
    printf("layer %d head %d  tv <= %.4f  error %.5f <= %.5f  %s\n", layer, head, c->worst_case_tv,
           error, c->output_error_bound, is_good ? "holds" : "WRONG");
    wrong += !is_good;
  }
  return wrong;
}

int main(int argc, char** argv) {
  make_numbers();
  const certkv_options options = {.struct_size = sizeof options,
                                  .kvstore_target = argc > 1 ? argv[1] : NULL,
                                  .worker_name = "attend.c"};
  const certkv_cache_spec spec = {.struct_size = sizeof spec,
                                  .model = "example@1",
                                  .layer_count = kLayers,
                                  .kv_head_count = kKvHeads,
                                  .group_size = kGroup,
                                  .head_dim = kDim,
                                  .rotary_dim = kDim};
  certkv_worker* worker = NULL;
  check(certkv_worker_attach(&options, &spec, &worker), "attach");

  static int32_t token_ids[kTokens];
  for (int i = 0; i < kTokens; ++i) token_ids[i] = 1000 + i;
  certkv_layer_kv layers[kLayers];
  for (int layer = 0; layer < kLayers; ++layer) {
    layers[layer].keys = keys[layer][0];
    layers[layer].values = values[layer][0];
  }
  certkv_sequence* sequence = NULL;
  check(certkv_worker_put_sequence(worker, token_ids, kTokens, layers, kLayers, &sequence), "put");

  // Another worker with the same tokens would find their blocks.
  certkv_sequence* prefix = NULL;
  certkv_sequence_info info = {.struct_size = sizeof info};
  check(certkv_worker_lookup(worker, token_ids, kTokens, &prefix), "lookup");
  check(certkv_sequence_get_info(prefix, &info), "info");
  printf("%lld of %d tokens are in whole blocks\n", (long long)info.token_count, kTokens);
  certkv_sequence_close(prefix);

  const certkv_request_terms terms = {.struct_size = sizeof terms,
                                      .has_tolerances = 1,
                                      .tv_tolerance = 0.1f,
                                      .value_tolerance = 0.1f};
  certkv_request* request = NULL;
  check(certkv_request_open(&options, "attend-c", &terms, &request), "request");
  certkv_attention* attention = NULL;
  check(certkv_attention_open(sequence, request, &attention), "attention");

  static float outputs[kLayers][kQueryHeads * kDim];
  static certkv_certificate certificates[kLayers][kQueryHeads];
  certkv_read reads[kLayers] = {{0}};
  certkv_read_result results[kLayers] = {{0}};
  for (int layer = 0; layer < kLayers; ++layer) {
    reads[layer].struct_size = sizeof(certkv_read);
    reads[layer].layer = layer;
    reads[layer].query_position = kTokens - 1;
    reads[layer].queries = queries[layer][0];
    results[layer].struct_size = sizeof(certkv_read_result);
    results[layer].outputs = outputs[layer];
    results[layer].certificates = certificates[layer];
    results[layer].certificate_size = sizeof(certkv_certificate);
  }
  check(certkv_attention_attend(attention, reads, kLayers, results), "attend");
  int wrong = 0;
  for (int layer = 0; layer < kLayers; ++layer) {
    wrong += count_wrong(layer, certificates[layer], outputs[layer]);
  }

  certkv_risk risk = {.struct_size = sizeof risk};
  check(certkv_request_finish(request, &risk), "finish");
  printf("gate counted %lld reads, worst tv %.4f\n", (long long)risk.read_count,
         risk.max_worst_case_tv);
  wrong += risk.read_count != kLayers * kQueryHeads;

  certkv_attention_close(attention);
  certkv_request_close(request);
  certkv_sequence_close(sequence);
  certkv_worker_close(worker);
  puts(wrong == 0 ? "all as certified" : "NOT AS CERTIFIED");
  return wrong == 0 ? 0 : 1;
}
