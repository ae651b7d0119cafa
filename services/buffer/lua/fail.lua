-- Fail: samples that ended without a usable trajectory.
-- ARGV: for each: book, ordinal, sample, attempt, class (infra or data), reason, outcome, message.
-- Reply: ok, then retry | dropped | stale for each | no_run
if not CFG.infra then return { 'no_run' } end

local function decide(at)
  local group, i, attempt = load(ARGV[at], ARGV[at + 1]), ARGV[at + 2], ARGV[at + 3]
  if not group then return 'stale' end
  local v = call('HMGET', group.key, 's' .. i, 'a' .. i)
  if v[2] ~= attempt then return 'stale' end
  -- A repeat gets the answer of the first call.
  if v[1] == 'x' then return 'dropped' end
  if group.state ~= 'open' or v[1] == 'd' then return 'stale' end
  if v[1] == 'q' then return attempt == '0' and 'stale' or 'retry' end
  return fail(group, i, attempt, ARGV[at + 4], ARGV[at + 5], ARGV[at + 6], ARGV[at + 7])
end

local reply = { 'ok' }
for at = 1, #ARGV, 8 do reply[#reply + 1] = decide(at) end
commit()
return reply
