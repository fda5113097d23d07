-- One step of gate's shared ledger (ledger.h), atomic because Redis runs a script alone.
--
-- KEYS: 1 the epoch, 2 the request, 3 the tenant.
-- ARGV: 1 operation, 2 epoch of the caller, 3 milliseconds for which the request is kept,
--       4 tenant's limit ('' = no tenant), 5 tenant's window in milliseconds, 6... operation's own.
-- Answer: status ('OK', or 'EPOCH': the ledger is not the one that the caller joined), then the
-- request's state (STATE below), then the operation's own. All are strings.
--
-- Lua's numbers are doubles and exact only to 2^53, amounts go to 2^62. So sums are HINCRBY's, which
-- are exact, amounts pass through as the strings they are, and a number is looked at for its sign
-- or to choose, never to add.
--
-- epoch    id, run (Redis's run_id), started (its time), version, policy, source (of the policy that
--          replicas share: with the epoch it goes, and they bring it back)
-- request  epoch, record, limit, left (limit less what is committed), cover (slices less what is
--          reported as certified), given (slices), reads, forced, closed, overrun,
--          s:LEASE = units:window of its tenant, b:REPORTER = last batch
-- tenant   epoch, start (of the window), committed

local epoch_key, request, tenant = KEYS[1], KEYS[2], KEYS[3]
local operation, epoch, keep_ms, tenant_limit, window_ms = ARGV[1], ARGV[2], ARGV[3], ARGV[4],
  tonumber(ARGV[5])
local has_tenant = tenant_limit ~= ''
-- Beyond it nothing is subtracted any more: HINCRBY would overflow, and all is spent anyway.
local FAR = -1e18

local function now_ms()
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end

-- Of a new process of Redis, or of one without our keys, all that was given before is unknown.
if operation == 'join' then
  local known = redis.call('HMGET', epoch_key, 'id', 'run')
  if known[1] and known[2] == ARGV[6] then return {'OK', known[1]} end
  redis.call('DEL', epoch_key)
  redis.call('HSET', epoch_key, 'id', epoch, 'run', ARGV[6], 'started',
    string.format('%.0f', now_ms()))
  return {'OK', epoch}
end

if redis.call('HGET', epoch_key, 'id') ~= epoch then return {'EPOCH'} end

-- Versions are small numbers.
if operation == 'policy' then
  if tonumber(ARGV[6]) > tonumber(redis.call('HGET', epoch_key, 'version') or '0') then
    redis.call('HSET', epoch_key, 'version', ARGV[6], 'policy', ARGV[7], 'source', ARGV[8])
  end
  local known = redis.call('HMGET', epoch_key, 'version', 'policy', 'source')
  return {'OK', known[1] or '0', known[2] or '', known[3] or ''}
end

-- The third key is the beginning of the tenants' keys here.
if operation == 'tenants' then
  local answer = {'OK'}
  for i = 6, #ARGV do
    local known = redis.call('HMGET', tenant .. ARGV[i], 'epoch', 'start', 'committed')
    local is_of_window = known[1] == epoch and now_ms() - tonumber(known[2]) < window_ms
    answer[#answer + 1] = is_of_window and known[3] or '0'
  end
  return answer
end

-- '-0' is no number to HINCRBY.
local function negative(amount) return amount == '0' and '0' or '-' .. amount end
local function get(field) return redis.call('HGET', request, field) end
local function is_void() return get('epoch') ~= epoch end

-- What `a` exceeds `b` by, as a string: exact, however large.
local function minus(a, b)
  redis.call('HSET', request, 'x', a)
  b = string.sub(b, 1, 1) == '-' and string.sub(b, 2) or negative(b)
  redis.call('HINCRBY', request, 'x', b)
  local difference = redis.call('HGET', request, 'x')
  redis.call('HDEL', request, 'x')
  return difference
end

-- Begins a window when it is time. In the first after the ledger was lost nothing is left: what was
-- committed in it is not known. A clock that was set back lengthens a window.
local function roll_tenant()
  local now = now_ms()
  local known = redis.call('HMGET', tenant, 'epoch', 'start')
  local started = tonumber(redis.call('HGET', epoch_key, 'started'))
  if known[1] ~= epoch then
    local lost = now - started < window_ms
    local start = lost and started or now
    redis.call('DEL', tenant)
    redis.call('HSET', tenant, 'epoch', epoch, 'start', string.format('%.0f', start), 'committed',
      lost and '4611686018427387904' or '0')
  elseif now - tonumber(known[2]) >= window_ms then
    redis.call('HSET', tenant, 'start', string.format('%.0f', now), 'committed', '0')
  end
  redis.call('PEXPIRE', tenant, string.format('%.0f', 2 * window_ms))
end

local function tenant_left() return minus(tenant_limit, redis.call('HGET', tenant, 'committed')) end

local function charge_tenant(units)
  if has_tenant and tonumber(redis.call('HGET', tenant, 'committed')) < 4.6e18 then
    redis.call('HINCRBY', tenant, 'committed', units)
  end
end

-- What has happened, whether it fits or not.
local function spend(units)
  if tonumber(get('left')) > FAR then redis.call('HINCRBY', request, 'left', negative(units)) end
  charge_tenant(units)
end

-- `units` of what is left here and at the tenant, or nothing.
local function take(units)
  if tonumber(redis.call('HINCRBY', request, 'left', negative(units))) < 0 then
    redis.call('HINCRBY', request, 'left', units)
    return false
  end
  if has_tenant and string.sub(minus(tenant_left(), units), 1, 1) == '-' then
    redis.call('HINCRBY', request, 'left', units)
    return false
  end
  charge_tenant(units)
  return true
end

-- The smaller, when a double can tell; take() refuses what was too much.
local function smaller(a, b) return tonumber(a) < tonumber(b) and a or b end

local function slice_units(asked, schedule)
  if schedule == 'share' then return asked end
  local given = math.min(tonumber(get('given')), 1e9)
  return string.format('%.0f', math.max(1, math.floor(
    tonumber(get('limit')) / ((given + 1) * (given + 2)))))
end

local function grant(lease, asked, schedule)
  if is_void() or get('forced') or get('closed') then return '0' end
  local whole = slice_units(asked, schedule)
  local units = smaller(get('left'), whole)
  if has_tenant then units = smaller(tenant_left(), units) end
  if tonumber(units) < math.max(1, math.floor(tonumber(whole) / 64)) then return '0' end
  -- What is not whole has to be a double for the lease that carries it.
  if units ~= whole and tonumber(units) > 2 ^ 53 then units = '9007199254740992' end
  if not take(units) then return '0' end
  redis.call('HINCRBY', request, 'cover', units)
  redis.call('HINCRBY', request, 'given', 1)
  local start = has_tenant and redis.call('HGET', tenant, 'start') or '0'
  redis.call('HSET', request, 's:' .. lease, units .. ':' .. start)
  return units
end

local function give_back(lease, spent)
  local slice = get('s:' .. lease)
  if not slice then return end
  redis.call('HDEL', request, 's:' .. lease)
  local units, start = string.match(slice, '^(%d+):(%d+)$')
  local unspent = minus(units, spent)
  -- More than the slice: all of it stays spent.
  if string.sub(unspent, 1, 1) == '-' or string.sub(spent, 1, 1) == '-' then return end
  if redis.call('HINCRBY', request, 'cover', negative(unspent)) < 0 then
    -- More was certified than the slices that are left: it stays spent.
    redis.call('HSET', request, 'cover', '0', 'overrun', '1')
    return
  end
  redis.call('HINCRBY', request, 'left', unspent)
  if has_tenant and redis.call('HGET', tenant, 'start') == start then
    redis.call('HINCRBY', tenant, 'committed', negative(unspent))
  end
end

local function count(reporter, batch, reads, certified, exact, forced, returned)
  local last = tonumber(get('b:' .. reporter) or '0')
  if tonumber(batch) <= last then return {'repeated', '0'} end
  if tonumber(batch) ~= last + 1 then return {'early', string.format('%.0f', last + 1)} end
  redis.call('HSET', request, 'b:' .. reporter, batch)
  redis.call('HINCRBY', request, 'reads', reads)
  if forced ~= '' and not get('forced') then redis.call('HSET', request, 'forced', forced) end
  if get('limit') ~= '0' then
    if redis.call('HINCRBY', request, 'cover', negative(certified)) < 0 then
      local beyond = string.sub(get('cover'), 2)
      redis.call('HSET', request, 'cover', '0', 'overrun', '1')
      spend(beyond)
    end
    spend(exact)
    for i = 1, #returned, 2 do give_back(returned[i], returned[i + 1]) end
  end
  return {'counted', '0'}
end

local function decide(units, exact)
  if exact == '1' then
    if get('limit') ~= '0' then spend(units) end
  elseif is_void() or get('forced') or get('closed') or not take(units) then
    return '0'
  end
  redis.call('HINCRBY', request, 'reads', 1)
  return '1'
end

local function state(more)
  local fields = redis.call('HMGET', request, 'record', 'closed', 'overrun', 'forced', 'limit',
    'left')
  local answer = {'OK', fields[1] and '1' or '0', fields[2] and '1' or '0',
    is_void() and '1' or '0', fields[3] and '1' or '0', fields[4] or '', fields[5] or '0',
    fields[6] or '0'}
  for _, one in ipairs(more or {}) do answer[#answer + 1] = one end
  return answer
end

if operation == 'open' and not get('record') then
  redis.call('HSET', request, 'epoch', epoch, 'record', ARGV[6], 'limit', ARGV[7], 'left', ARGV[7],
    'cover', '0', 'given', '0', 'reads', '0')
end
if not get('record') then return state({'', '0'}) end
redis.call('PEXPIRE', request, keep_ms)
if has_tenant then roll_tenant() end

if operation == 'open' or operation == 'load' then return state({get('record')}) end
if operation == 'grant' then
  local units = grant(ARGV[6], ARGV[7], ARGV[8])
  return state({units})
elseif operation == 'count' then
  local returned = {}
  for i = 12, #ARGV do returned[#returned + 1] = ARGV[i] end
  local verdict = count(ARGV[6], ARGV[7], ARGV[8], ARGV[9], ARGV[10], ARGV[11], returned)
  return state(verdict)
elseif operation == 'decide' then
  local taken = decide(ARGV[6], ARGV[7])
  return state({taken})
elseif operation == 'close' then
  redis.call('HSET', request, 'closed', '1')
  return state({})
end
return redis.error_reply('unknown operation ' .. operation)
