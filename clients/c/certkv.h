// The C interface of CertKV's client library: C11, and C++ as it is. Link libcertkv
// (`pkg-config --cflags --libs certkv`, or CMake's find_package(certkv) and certkv::certkv).
// docs/c-api.md is the guide; clients/c/example/attend.c a whole program.
//
// Compatibility: every function is exported under a version (CERTKV_1.0). Nothing is taken away or
// changed while the library's name ends in .so.1; functions, and fields at the ends of structs, may
// be added. A struct that can grow begins with struct_size: write sizeof, and zero the rest.
//
//   certkv_read read = {.struct_size = sizeof read, .layer = 0};
//
// Zero, or NULL, is the default of every field that has one. A library that is older than the
// header takes a longer struct as long as what it does not know is zero.
//
// Errors: a function returns a certkv_status, by which the caller decides what to do next. Reason
// (a word of docs/errors.md) and message of the last call of this thread are at hand until its next
// one: certkv_error_reason, certkv_error_message. Unless said otherwise, nothing was written then.
// Every function may return, beside what it says,
//   INVALID_ARGUMENT [ARGUMENT_MISSING]     a pointer that must not be NULL is NULL
//   INVALID_ARGUMENT [STRUCT_SIZE_INVALID]  a struct_size that no version of the struct has
//   FAILED_PRECONDITION [PROCESS_FORKED]    the handle was made by this process's parent
//   RESOURCE_EXHAUSTED [OUT_OF_MEMORY]      this process has no memory left
//   INTERNAL [UNEXPECTED_EXCEPTION]         a defect of the library; no C++ exception leaves it
//
// Memory: arguments are borrowed until the call returns. A handle is the caller's until it is
// closed, once. Handles may be closed in any order: what one needs of another stays while it lives.
// Closing NULL does nothing. In a forked child, closing frees nothing and ends nothing.
//
// Threads: all functions may be called from several threads, also on one handle, but no handle
// while another thread closes it. Calls on one sequence and on the attentions over it wait for each
// other. No function is a cancellation point that survives pthread_cancel. Functions block on the
// servers, at most as long as certkv_options says, unless their comment says that they do not.
#ifndef CERTKV_CLIENTS_C_CERTKV_H_
#define CERTKV_CLIENTS_C_CERTKV_H_

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif
#pragma GCC visibility push(default)

// Values are gRPC's codes.
typedef enum certkv_status {
  CERTKV_OK = 0,
  CERTKV_CANCELLED = 1,
  CERTKV_UNKNOWN = 2,
  CERTKV_INVALID_ARGUMENT = 3,     // fix the call
  CERTKV_DEADLINE_EXCEEDED = 4,    // no answer in time
  CERTKV_NOT_FOUND = 5,            // what was asked for is not there
  CERTKV_ALREADY_EXISTS = 6,       //
  CERTKV_PERMISSION_DENIED = 7,    // the identity may not do this
  CERTKV_RESOURCE_EXHAUSTED = 8,   // wait, then the same call; see certkv_error_retry_delay_ms
  CERTKV_FAILED_PRECONDITION = 9,  // fix the state, then call again
  CERTKV_ABORTED = 10,             // look the sequence up again
  CERTKV_OUT_OF_RANGE = 11,        //
  CERTKV_UNIMPLEMENTED = 12,       // the server does not know the call
  CERTKV_INTERNAL = 13,            // a defect: report it
  CERTKV_UNAVAILABLE = 14,         // a server is not there: call again later
  CERTKV_DATA_LOSS = 15,           // bytes are gone: put the sequence again
  CERTKV_UNAUTHENTICATED = 16      // token or certificate is missing or refused
} certkv_status;

// The version of the library, "0.1.0"; static.
const char* certkv_version(void);
// "INVALID_ARGUMENT"; static, "?" for what is no status.
const char* certkv_status_name(certkv_status status);
// Of the last call in this thread that returned a status, until the next one; "" when it was OK.
// The thread's own: do not free.
const char* certkv_error_message(void);
const char* certkv_error_reason(void);
// How many milliseconds to wait before the same call may succeed; 0 = nobody said.
int64_t certkv_error_retry_delay_ms(void);

// How the servers are reached.
typedef struct certkv_options {
  size_t struct_size;
  // gRPC targets, "unix:/run/certkv/certkvd.sock" or "host:port". NULL: the store at its default
  // socket, certifier and gate where the store is (certkvd serves all three on one socket). That of
  // the certifier may name several replicas (docs/operations.md).
  const char* kvstore_target;
  const char* certifier_target;
  const char* gate_target;
  const char* worker_name;  // for people, in lists and errors; NULL = "worker"
  const char* tenant;       // whose blocks and quota; NULL = the identity's only one, or nobody
  const char* ca_file;      // PEM, whose certificate TCP servers have; NULL = no TLS
  const char* certificate_file;  // PEM, this client's, where a server asks for one
  const char* key_file;          // PEM, its private key
  const char* token_file;        // of a bearer token; others may not read the file
  int64_t rpc_timeout_ms;        // deadline of a call; 0 = 10000
  int64_t seal_timeout_ms;       // deadline of a call that quantizes blocks; 0 = 120000
  int64_t lease_duration_ms;     // of block leases, renewed at a third of it; 0 = 30000
  // How long a call waits in all when the store has no room; 0 = 5000, -1 = not at all.
  int64_t pressure_wait_ms;
  int32_t staging_slot_count;  // blocks that are written at once, [0, 4096]; 0 = the server's
} certkv_options;

typedef enum certkv_key_format {
  CERTKV_KEY_K8 = 1,
  CERTKV_KEY_K6 = 2,
  CERTKV_KEY_K4 = 3,
  CERTKV_KEY_FP8_E4M3 = 4,
  CERTKV_KEY_F16 = 5,
  CERTKV_KEY_BF16 = 6,
  CERTKV_KEY_K8D = 7
} certkv_key_format;
typedef enum certkv_value_format {
  CERTKV_VALUE_V4 = 1,
  CERTKV_VALUE_V8 = 2,
  CERTKV_VALUE_F16 = 5,
  CERTKV_VALUE_BF16 = 6
} certkv_value_format;
// Which channels the rotary embedding rotates together.
typedef enum certkv_rope_pairing {
  CERTKV_ROPE_NONE = 1,
  CERTKV_ROPE_INTERLEAVED = 2,  // (2i, 2i + 1)
  CERTKV_ROPE_HALF_SPLIT = 3    // (i, i + rotary_dim / 2)
} certkv_rope_pairing;
typedef enum certkv_dtype { CERTKV_F16 = 1, CERTKV_BF16 = 2 } certkv_dtype;

// One layer's storage; formats are those of docs/formats.md.
typedef struct certkv_layer_spec {
  size_t struct_size;
  int32_t key_format;      // certkv_key_format; 0 = K8
  int32_t value_format;    // certkv_value_format; 0 = V4
  int32_t witness_bands;   // 0, 1 or 4 bytes per token; FP8_E4M3 needs 4
  int32_t sliding_window;  // tokens that a query sees, itself included; 0 = all
  float fp8_key_scale;     // FP8_E4M3 alone, > 0; 0 = 1
  // Weights of channels in the token witness, [kv_head_count][head_dim], each in [1/256, 256]; any
  // are sound, those made from a model's queries tighten bounds. Needs witness_bands; NULL = all 1.
  const float* witness_weights;
} certkv_layer_spec;

// Geometry and numerics of one model's cache. Workers with equal specs share blocks.
typedef struct certkv_cache_spec {
  size_t struct_size;
  const char* model;                // name and revision of the weights, 1 to 256 bytes; required
  const certkv_layer_spec* layers;  // [layer_count]; NULL = all of the default formats
  int32_t layer_count;              // [1, 256]; required
  int32_t kv_head_count;            // of this rank, [1, 256]; required
  int32_t group_size;               // query heads per KV head, [1, 16]; required
  int32_t head_dim;                 // d: 64, 80, 96, 128 or 256; required
  int32_t value_dim;                // d_v: the same choices; 0 = head_dim
  int32_t block_tokens;             // a multiple of 64 in [64, 1024]; 0 = 64
  int32_t rope_pairing;             // certkv_rope_pairing; 0 = interleaved
  int32_t rotary_dim;               // rotated channels, even, [0, d]; 0 exactly with ROPE_NONE
  int32_t original_dtype;           // certkv_dtype of the keys and values that are put; 0 = F16
  float rope_theta;                 // base of the rotary frequencies; 0 = 10000
  float logit_scale;                // finite and > 0; 0 = 1 / sqrt(d)
  float soft_cap;                   // nats; cap * tanh(logit / cap); 0 = none
} certkv_cache_spec;

typedef struct certkv_worker certkv_worker;
typedef struct certkv_sequence certkv_sequence;
typedef struct certkv_request certkv_request;
typedef struct certkv_attention certkv_attention;

// What the store counts; since it started, but for the first two.
typedef struct certkv_store_stats {
  size_t struct_size;
  int64_t session_count;
  int64_t lease_count;
  int64_t blocks_sealed;
  int64_t blocks_shared;   // sealed by a worker when another had sealed the same
  int64_t blocks_evicted;  // dropped to make room
  int64_t lookup_blocks_asked;
  int64_t lookup_blocks_found;
} certkv_store_stats;
// Errors: UNAVAILABLE, no store at the target; those of the options' files.
certkv_status certkv_get_store_stats(const certkv_options* options, certkv_store_stats* stats);

// A worker: a session with the store, whose memory is mapped. One per process and spec is enough.
// Errors: INVALID_ARGUMENT [CACHE_SPEC_INVALID]; UNAVAILABLE; RESOURCE_EXHAUSTED [SESSION_LIMIT |
// CACHE_LIMIT | SLAB_TOO_SMALL]; those of the options' files.
certkv_status certkv_worker_attach(const certkv_options* options, const certkv_cache_spec* spec,
                                   certkv_worker** worker);
void certkv_worker_close(certkv_worker* worker);

// Keys and values of one layer, 16 bits each as the spec says, row-major. It never grows.
typedef struct certkv_layer_kv {
  const uint16_t* keys;    // [tokens][kv_head_count][d]
  const uint16_t* values;  // [tokens][kv_head_count][d_v]
} certkv_layer_kv;

// A sequence: blocks that are leased while the handle lives, and a tail of less than a block.
//
// Puts one whole: the prefix that the store has is shared, the rest is written. `layers` has one
// entry per layer of the spec, for all of token_ids. token_count is in [1, 2^24].
// Errors: INVALID_ARGUMENT [SEQUENCE_INVALID | NON_FINITE_KEY | NON_FINITE_VALUE];
// RESOURCE_EXHAUSTED [STORE_FULL | QUOTA_EXCEEDED | STAGING_FULL]; nothing stays leased then.
certkv_status certkv_worker_put_sequence(certkv_worker* worker, const int32_t* token_ids,
                                         int64_t token_count, const certkv_layer_kv* layers,
                                         int32_t layer_count, certkv_sequence** sequence);
// The longest prefix of whole blocks that the store has; a sequence without tokens when it has
// none. Errors: INVALID_ARGUMENT [SEQUENCE_INVALID].
certkv_status certkv_worker_lookup(certkv_worker* worker, const int32_t* token_ids,
                                   int64_t token_count, certkv_sequence** sequence);
void certkv_sequence_close(certkv_sequence* sequence);

typedef struct certkv_sequence_info {
  size_t struct_size;
  int64_t token_count;
  int64_t block_count;         // whole blocks
  int64_t shared_block_count;  // of them, those that the store had already
  int64_t tail_token_count;    // tokens after the last whole block
} certkv_sequence_info;
// Does not block on a server.
certkv_status certkv_sequence_get_info(certkv_sequence* sequence, certkv_sequence_info* info);
// Are the blocks still leased? Errors: FAILED_PRECONDITION [LEASE_LOST]. Does not block on a
// server.
certkv_status certkv_sequence_check_lease(certkv_sequence* sequence);
// Keeps whole blocks in memory for ttl_ms (0: until unpinned) also when nobody leases them, or,
// pinned = 0, lets them go. Errors: RESOURCE_EXHAUSTED [PIN_LIMIT]; NOT_FOUND [BLOCK_NOT_FOUND].
certkv_status certkv_sequence_pin(certkv_sequence* sequence, int pinned, int64_t ttl_ms);

// Appends one token; `layers` point at its rows alone. Call certkv_attention_refresh after it.
// Errors: as certkv_worker_put_sequence. When a tail that has become a block can't be sealed, the
// sequence ends at its last whole block.
certkv_status certkv_sequence_append(certkv_sequence* sequence, int32_t token_id,
                                     const certkv_layer_kv* layers, int32_t layer_count);
// The same in steps, for engines that compute a token's layers one after the other, each from reads
// of the one before: begin, then for each layer in order write and read, then finish. The token can
// be read at layers that are written. Errors: INVALID_ARGUMENT [SEQUENCE_INVALID], a step out of
// order; as append.
certkv_status certkv_sequence_begin_token(certkv_sequence* sequence, int32_t token_id);
// Does not block on a server.
certkv_status certkv_sequence_write_layer(certkv_sequence* sequence, int32_t layer,
                                          const certkv_layer_kv* kv);
certkv_status certkv_sequence_finish_token(certkv_sequence* sequence);

typedef enum certkv_read_mode {
  CERTKV_READ_ENFORCE = 1,  // certified within tolerance, or exact, or an error
  CERTKV_READ_OBSERVE = 2,  // measured only; outputs outside tolerance say so
  CERTKV_READ_EXACT = 3     // from originals alone
} certkv_read_mode;

// A request's terms at gate.
typedef struct certkv_request_terms {
  size_t struct_size;
  const char* label;        // free text for people, at most 256 bytes
  const char* tenant;       // whose budget it shares; NULL = the options'
  const char* model;        // for policies by model; NULL = unknown
  const char* traceparent;  // W3C trace context, into the servers' logs; NULL = a new one
  int32_t read_mode;        // certkv_read_mode; 0 = ENFORCE
  // 0: the tolerances below are the policy's and must be 0. 1: they are asked for; gate gives none
  // that are looser than the policy's.
  int32_t has_tolerances;
  float tv_tolerance;      // largest total variation between exact and served softmax, [0, 1]
  float value_tolerance;   // largest value term, in parts of the value radius, >= 0
  float output_tolerance;  // largest output error bound, value units; 0 = no limit
  float skip_tolerance;    // part of tv_tolerance that skipped tokens may cost, [0, 1)
} certkv_request_terms;

// A request: its account at gate. request_id is 1 to 128 of [a-zA-Z0-9._-]; terms may be NULL.
// Errors: INVALID_ARGUMENT [REQUEST_ID_INVALID | TOLERANCE_INVALID | READ_MODE_UNKNOWN];
// RESOURCE_EXHAUSTED [REQUEST_LIMIT]; UNAVAILABLE, no gate at the target.
certkv_status certkv_request_open(const certkv_options* options, const char* request_id,
                                  const certkv_request_terms* terms, certkv_request** request);
// Without gate: every read is exact. For engines that must go on when gate is down. Does not block.
certkv_status certkv_request_open_ungoverned(const char* request_id, certkv_request** request);

// What gate knows of a request's risk (RequestRisk in proto/certkv/gate/v1/gate.proto).
typedef struct certkv_risk {
  size_t struct_size;
  int64_t read_count;  // one query head at one position of one layer each
  int64_t failed_read_count;
  int64_t reads_certified_first;  // without a repair
  int64_t reads_repaired_values;  // certified after this rung of the ladder, and so on
  int64_t reads_repaired_keys;
  int64_t reads_repaired_head;
  int64_t reads_repaired_layer;
  int64_t reads_exact;
  int64_t reads_observed;
  int64_t repair_bytes;
  int64_t canary_checks;
  int64_t canary_mismatches;
  double sum_worst_case_tv;
  double budget;            // 0 = none
  double budget_committed;  // given away or spent of it
  float risk_score;         // [0, 1]
  float max_worst_case_tv;  // [0, 1]
  int32_t is_closed;
} certkv_risk;
// Sends all certificates to gate and waits until they are counted.
// Errors: UNAVAILABLE [GATE_UNREACHABLE | LEDGER_INCOMPLETE]; DEADLINE_EXCEEDED [REPORT_TIMEOUT].
certkv_status certkv_request_flush(certkv_request* request);
// Errors: FAILED_PRECONDITION [REQUEST_UNGOVERNED]; UNAVAILABLE.
certkv_status certkv_request_get_risk(certkv_request* request, certkv_risk* risk);
// Flushes and closes the request at gate; `risk`, its last, may be NULL. The handle still has to be
// closed. Errors: as certkv_request_flush and certkv_request_get_risk.
certkv_status certkv_request_finish(certkv_request* request, certkv_risk* risk);
// Frees the handle; finishes first what was not finished, for at most a second.
void certkv_request_close(certkv_request* request);

// Attention: certified reads of one sequence under one request. When the certifier or gate is gone,
// reads become exact, in this process.
// Errors: FAILED_PRECONDITION [LEASE_LOST]; ABORTED [BLOCK_REUSED].
certkv_status certkv_attention_open(certkv_sequence* sequence, certkv_request* request,
                                    certkv_attention** attention);
void certkv_attention_close(certkv_attention* attention);
// Tells the certifier at once of what was appended; else the next read does. Errors: as open.
certkv_status certkv_attention_refresh(certkv_attention* attention);

// One layer and position, all query heads.
typedef struct certkv_read {
  size_t struct_size;
  const float* queries;      // [query_head_count][d], query_head_count = kv_head_count * group_size
  const float* sink_logits;  // [query_head_count] nats; NULL = none
  int64_t query_position;    // reads tokens 0 to query_position, or the layer's window
  int32_t layer;
} certkv_read;

typedef enum certkv_rung {
  CERTKV_RUNG_NONE = 1,  // no repair
  CERTKV_RUNG_VALUES = 2,
  CERTKV_RUNG_KEYS = 3,
  CERTKV_RUNG_HEAD = 4,
  CERTKV_RUNG_LAYER = 5
} certkv_rung;
typedef enum certkv_outcome {
  CERTKV_CERTIFIED = 1,  // within every tolerance of the request
  CERTKV_EXACT = 2,      // computed from originals alone
  CERTKV_OBSERVED = 3    // READ_OBSERVE alone: measured, outside tolerance
} certkv_outcome;

// What is proven of one query head's output (docs/bounds.md). Bounds are rounded up, may be
// +infinity, and are never NaN. It grows at its end; certificate_size says how long the caller's
// is.
typedef struct certkv_certificate {
  int64_t query_position;
  int64_t repair_bytes;  // originals re-read for this head
  int64_t read_tokens;
  int64_t skipped_tokens;
  int64_t read_bytes;
  int32_t layer;
  int32_t query_head;
  int32_t rung;               // certkv_rung
  int32_t outcome;            // certkv_outcome
  float worst_case_tv;        // [0, 1] total variation between exact and served softmax, at most
  float value_term;           // value units
  float output_error_bound;   // value units: L2 distance from the exact output, at most
  float value_radius;         // value units
  float first_worst_case_tv;  // before any repair
  float failure_probability;  // that the bounds above do not hold; 0 = they hold for sure
  float skipped_share;        // [0, 1] part of worst_case_tv that skipped tokens cost
  int32_t key_format;         // certkv_key_format; 0 = not said
  int32_t value_format;       // certkv_value_format; 0 = not said
  int32_t reserved_zero;      // 0
} certkv_certificate;

// Where a read's outputs go, and what became of it.
typedef struct certkv_read_result {
  size_t struct_size;
  float* outputs;                    // in: [query_head_count][d_v]; NaN everywhere unless status OK
  certkv_certificate* certificates;  // in: [query_head_count]; NULL = not wanted
  size_t certificate_size;           // in: sizeof(certkv_certificate)
  int64_t read_time_ns;              // out
  int32_t status;                    // out: certkv_status of this read alone
  int32_t is_in_process;             // out: 1 = read here, because the certifier couldn't be used
  int32_t is_canary;                 // out: 1 = gate asks for certkv_attention_check_used
  char reason[64];                   // out: "" when OK
  char message[512];                 // out: "" when OK; cut to fit
} certkv_read_result;

// Reads in order. Elements of an array have one struct_size, that of the first, which is how far
// apart they are. read_count is in [1, 4096]. Certificates are reported to gate.
// Errors: that of the first read that failed; other results are as their own status says. On
// INVALID_ARGUMENT [ARGUMENT_MISSING | STRUCT_SIZE_INVALID | READ_INVALID] of the call itself no
// result was written.
certkv_status certkv_attention_attend(certkv_attention* attention, const certkv_read* reads,
                                      int32_t read_count, certkv_read_result* results);
// Compares outputs as the engine used them, [query_head_count][d_v], with exact attention computed
// here, and reports what it finds to gate; for reads with is_canary. `result` is the read's, with
// its certificates. Errors: INVALID_ARGUMENT [READ_INVALID]; DATA_LOSS; nothing is reported then.
certkv_status certkv_attention_check_used(certkv_attention* attention, const certkv_read* read,
                                          const certkv_read_result* result, const float* used);

#pragma GCC visibility pop
#ifdef __cplusplus
}  // extern "C"
#endif

#endif  // CERTKV_CLIENTS_C_CERTKV_H_
